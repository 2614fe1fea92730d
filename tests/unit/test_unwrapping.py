"""The entry point for optimisers: wrappers are unwrapped or refused, and own steps are noticed."""

from __future__ import annotations

import ast
import functools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.shared import for_each
from tests.unit.wrappers import (
    OPAQUE,
    TRANSPARENT,
    AdamWithSettings,
    Clipping,
    Elsewhere,
    Lookahead,
    Negated,
    Nested,
    NoOptimizer,
    SignAdamW,
    SignAdamW2,
    WithSettings,
    net,
    passed,
    sgd,
    train,
)
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import laconic
from laconic.core.errors import AttachError
from laconic.optim import LARS, master_weights
from laconic.optim.outside_state import kept_outside
from laconic.optim.own_step import check_step, steps_as
from laconic.optim.unwrapping import (
    after_steps,
    before_steps,
    is_ours,
    require_plain,
    stepping,
    unwrap,
    unwrap_all,
)
from laconic.strategies.distributed_optimizer import DistributedOptimizer

SRC = Path(laconic.__file__).parent


class Ours(DistributedOptimizer):
    """What `distribute` returns, without ranks."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state


def test_wrappers_of_trainers_are_unwrapped_and_others_are_not() -> None:
    model = net()
    inner = sgd(model)
    for wrap in TRANSPARENT:
        assert unwrap(wrap(inner)) is inner, wrap
        assert require_plain(wrap(inner), "a test") is inner, wrap
        assert unwrap_all([wrap(inner)])[0] == [inner], wrap
    for kind in OPAQUE:
        wrapped = kind(sgd(model))
        assert unwrap(wrapped) is wrapped, kind
        with pytest.raises(AttachError, match=f"{kind.__name__} wraps a .* and has a step of its own"):
            require_plain(wrapped, "a test")


@for_each("wrap", [lambda optimizer: optimizer, *TRANSPARENT])
def test_our_own_optimiser_inside_a_trainers_wrapper_is_known(wrap: Any) -> None:
    model = net()
    inner = sgd(model)
    ours = Ours(inner)
    assert is_ours(wrap(ours)) and not is_ours(wrap(inner))
    assert require_plain(wrap(ours), "a test") is inner
    assert require_plain(wrap(Ours(wrap(inner))), "a test") is inner
    with pytest.raises(AttachError, match=r"wrap it, as in laconic\.distribute"):
        master_weights(wrap(ours))
    with pytest.raises(AttachError, match="distributed already"):
        laconic.distribute(model, wrap(ours), "local_sgd()")
    with pytest.raises(AttachError, match=r"Lookahead wraps a .* and has a step of its own"):
        require_plain(wrap(Ours(Lookahead(inner))), "a test")


def test_hooks_go_where_each_update_passes() -> None:
    """The wrapper's own where the inner one holds a part of the parameters only, as in ZeRO."""
    for kind in OPAQUE:
        model = net()
        inner = sgd(model)
        assert stepping(kind(inner)) is inner, kind
        part = SGD([model[0].weight], lr=0.1)
        wrapper = Elsewhere(model.parameters(), early=False, lr=0.1)
        wrapper.optim = part  # type: ignore[attr-defined]
        assert stepping(wrapper) is wrapper
    unhooked = types.new_class(
        "Unhooked", (Optimizer,), {}, lambda body: body.update(__init__=lambda self: None)
    )
    with pytest.raises(AttachError, match="runs no hooks"):
        stepping(unhooked())


def test_hooks_run_once_if_a_step_calls_that_of_its_parent() -> None:
    """torch runs those of both steps once an optimiser of the parent's class exists."""
    sgd(net())
    optimizer = Nested(net().parameters(), lr=0.1)
    seen: list[str] = []
    before_steps(optimizer, lambda *_: seen.append("before"))
    after_steps(optimizer, lambda *_: seen.append("after"))

    def fails() -> float:
        raise ZeroDivisionError

    optimizer.step()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(fails)
    optimizer.step()
    assert seen == ["before", "after", "before", "before", "after"]


def test_masks_are_the_same_if_a_step_calls_that_of_its_parent() -> None:
    weights = []
    for kind in (SGD, Nested):
        model = net()
        optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
        sparse = laconic.sparsity.rigl(model, optimizer, density=0.3, steps=40, every=2)
        train(model, optimizer, range(12))
        weights.append([each.detach().clone() for each in model.parameters()])
        sparse.remove()
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_what_is_no_optimiser_is_refused_with_the_fix() -> None:
    model = net()
    inner = sgd(model)
    for given, fix in (
        (NoOptimizer(inner), "give that one, its ._optimizer"),
        (LambdaLR(inner, lambda step: 1.0), "scheduler.optimizer"),
        (model[0].weight, "build one over them"),
        (None, "got NoneType"),
    ):
        with pytest.raises(AttachError, match=fix):
            unwrap(given)


def instance_patched(optimizer: Optimizer) -> Optimizer:
    """A profiler's patch, without functools.wraps, as Accelerate's is."""
    method = optimizer.step

    def timed(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    optimizer.step = timed  # type: ignore[method-assign]
    return optimizer


def wrapped_again(optimizer: Optimizer) -> Optimizer:
    method = optimizer.step
    optimizer.step = functools.wraps(method)(lambda *args, **kwargs: method(*args, **kwargs))  # type: ignore
    return optimizer


def replaced(optimizer: Optimizer) -> Optimizer:
    optimizer.step = types.MethodType(lambda self, closure=None: None, optimizer)  # type: ignore
    return optimizer


def test_a_step_of_its_own_is_told_from_a_patch() -> None:
    half = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]
    weight = [nn.Parameter(torch.zeros(2))]
    scheduled = SGD(weight, lr=0.1)
    LambdaLR(scheduled, lambda step: 1.0)
    decorated = type("Decorated", (SGD,), {"step": torch.no_grad()(SGD.step)})
    plain: list[Optimizer] = [
        SGD(weight), WithSettings(weight), decorated(weight), scheduled, AdamWithSettings(weight),
        AdamW(weight), LARS(weight), instance_patched(SGD(weight)), wrapped_again(AdamW(weight)),
        master_weights(SGD(half)),
        SGD(weight, foreach=True), AdamW(weight, foreach=False),
    ]  # fmt: skip
    for each in plain:
        assert steps_as(each, SGD, Adam, AdamW, LARS), each
        check_step(each, SGD, Adam, AdamW, LARS, instead="cgx()")
    own: list[Optimizer] = [
        Negated(weight), Clipping(weight), SignAdamW(weight), SignAdamW2(weight), replaced(SGD(weight)),
        instance_patched(Negated(weight)), Adam(weight),
    ]  # fmt: skip
    for each in own[:-1]:
        assert not steps_as(each, SGD, Adam, AdamW), each
        with pytest.raises(AttachError, match=r"cgx\(\)"):
            check_step(each, SGD, Adam, AdamW, instead="cgx()")
    assert not steps_as(own[-1], SGD)


def test_the_first_object_of_a_class_may_be_a_subclass() -> None:
    """torch then puts its wrapper on the subclass, around the parent's step."""
    kind = type("Fresh", (SGD,), {})
    del_hooked = functools.partial(setattr, SGD, "step", SGD.step)
    plain = SGD.step.__wrapped__  # type: ignore[attr-defined]
    SGD.step = plain  # type: ignore[method-assign]
    try:
        made = kind([nn.Parameter(torch.zeros(2))])
        assert "step" in vars(kind) and steps_as(made, SGD)
    finally:
        del_hooked()


def test_tensors_outside_of_the_state_are_found() -> None:
    model = net()
    for early in (True, False):
        optimizer = Elsewhere(model.parameters(), early, lr=0.1)
        assert bool(kept_outside(optimizer)) == early
        train(model, optimizer, range(1))
        assert kept_outside(optimizer) == "Elsewhere.kept['buffers'][0]"
    for plain in (
        sgd(model),
        AdamW(model.parameters()),
        LARS(model.parameters()),
        SignAdamW(model.parameters()),
    ):
        train(model, plain, range(2))
        plain.views = [each.detach() for each in model.parameters()]  # type: ignore[union-attr]
        assert not kept_outside(plain), plain
        plain.state["slow"] = {"weights": [model[0].weight.detach().clone()]}  # type: ignore[index]
        assert kept_outside(plain).startswith(f"{type(plain).__name__}.state"), plain
    places: dict[str, Any] = {
        "a flat buffer": lambda o, m: setattr(o, "flat", torch.zeros(sum(p.numel() for p in m.parameters()))),
        "a flat weight": lambda o, m: setattr(o, "flat", [m[2].weight.detach().flatten().clone()]),
        "an object": lambda o, m: setattr(o, "kept", types.SimpleNamespace(m=torch.zeros(24, 12))),
        "a parameter": lambda o, m: setattr(m[0].weight, "momentum", torch.zeros(24, 12)),
    }
    for name, put in places.items():
        other = net()
        optimizer = sgd(other)
        assert not kept_outside(optimizer)
        put(optimizer, other)
        assert kept_outside(optimizer), name


FEATURES = {
    "rigl": lambda m, o: laconic.sparsity.rigl(m, o, density=0.2, steps=100),
    "gradual_pruning": lambda m, o: laconic.sparsity.sparsify(
        m, o, "gradual_pruning(density=0.2)", steps=100
    ),
    "static_masks": lambda m, o: laconic.sparsity.sparsify(m, o, "static_masks(density=0.2)", steps=100),
    "admm": lambda m, o: laconic.lowbit.admm(m, o, every=2),
    "extragradient": lambda m, o: laconic.lowbit.admm(m, o, extragradient=True),
    "straight_through": lambda m, o: laconic.lowbit.straight_through(m, o),
    "master_weights": lambda m, o: laconic.optim.master_weights(o),
}


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_unwraps_or_refuses_before_anything_has_changed(name: str) -> None:
    half = name == "master_weights"
    for wrap in (*OPAQUE, *((lambda inner: Elsewhere(held(inner), early=True, lr=0.1),) if not half else ())):
        model = net().to(torch.bfloat16 if half else torch.float32)
        before = [each.detach().clone() for each in model.parameters()]
        optimizer = wrap(sgd(model))
        hooks = [len(each._backward_hooks or ()) for each in model.parameters()]
        with pytest.raises(AttachError, match=r"step of its own|keeps what belongs to single weights"):
            FEATURES[name](model, optimizer)
        assert all(map(torch.equal, before, model.parameters())), wrap
        assert hooks == [len(each._backward_hooks or ()) for each in model.parameters()], wrap
        assert not any(part._optimizer_step_post_hooks for part in (optimizer, inside(optimizer))), wrap
    for wrap in TRANSPARENT:
        ends = []
        for each in (wrap, lambda inner: inner):
            model = net().to(torch.bfloat16 if half else torch.float32)
            optimizer = each(sgd(model, momentum=0.5))
            FEATURES[name](model, optimizer)
            if half:
                model.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(),))
            train(model, optimizer, range(6))
            ends.append([p.detach().clone() for p in model.parameters()])
        assert all(map(torch.equal, *ends)), wrap


def held(optimizer: Optimizer) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def inside(optimizer: Any) -> Optimizer:
    found: Optimizer = getattr(optimizer, "inside", optimizer)
    return found


def test_a_scaler_that_steps_by_an_earlier_step_is_no_place_for_masters() -> None:
    model = net().to(torch.float16)
    wrapped = TRANSPARENT[0](sgd(model), scaler=torch.amp.GradScaler("cpu"))  # type: ignore[call-arg]
    with pytest.raises(AttachError, match="before the trainer wraps"):
        master_weights(wrapped)


def test_activations_find_the_momentum_inside_a_wrapper() -> None:
    for wrap in (*TRANSPARENT, *OPAQUE):
        model = net()
        optimizer = wrap(sgd(model))
        passed(model, 0)
        inside_of = stepping(unwrap(optimizer))
        inside_of.step()
        session = laconic.activations.compress(model, "comet()", optimizer)
        found = session._momentum(model[0].weight)
        assert found is not None and torch.equal(found, inside_of.state[model[0].weight]["momentum_buffer"])


def test_no_other_file_hooks_an_optimiser() -> None:
    """Or unwraps one: every feature uses the entry point."""
    allowed = {"optim/unwrapping.py"}
    for path in SRC.rglob("*.py"):
        if (name := path.relative_to(SRC).as_posix()) in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            hooks = called in ("register_step_pre_hook", "register_step_post_hook")
            assert not hooks, f"{name}:{node.lineno} hooks an optimiser: use before_steps and after_steps"
            text = ast.unparse(node)
            asks = text.startswith("isinstance(") and text.endswith((", Optimizer)", ".Optimizer)"))
            assert not asks, f"{name}:{node.lineno} asks for an Optimizer: use unwrap"
