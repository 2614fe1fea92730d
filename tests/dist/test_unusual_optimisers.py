"""Unusual optimisers on two ranks: groups changed in place, subclasses, wrappers, two sets of weights."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import laconic
from laconic.core.errors import AttachError, NonFiniteError
from laconic.optim.step_watch import PASSES
from tests.dist.nets import agree, compress_anyway, flat
from tests.unit.wrappers import (
    OPAQUE,
    SAM,
    TRANSPARENT,
    Clipping,
    Lookahead,
    Negated,
    NoOptimizer,
    Ranger,
    ScheduleFree,
    SignAdamW,
    SignAdamW2,
    WithSettings,
    net,
    sgd,
)


def passed(model, step):
    """A backward pass with this rank's batch of this step."""
    rng = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(16, 12, generator=rng)
    nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        passed(model, step)
        optimizer.step()


def regrouped(spec, case, in_place):
    """The weights after eight steps; in the middle groups change, in place or by new ones."""
    model = DistributedDataParallel(net())
    a, b, c, d = model.parameters()
    options = {"lr": 0.1, "momentum": 0.9}
    if case == "add":
        optimizer = SGD([b, c, d], **options)
    else:
        optimizer = SGD([{"params": [a, b]}, {"params": [c, d], "lr": 0.0, "momentum": 0.5}], **options)
    if spec:
        compress_anyway(model, optimizer, spec)
    train(model, optimizer, range(4))
    first, last = optimizer.param_groups[0], optimizer.param_groups[-1]
    if case == "move" and in_place:
        first["params"].append(last["params"].pop(0))
    elif case == "move":
        optimizer.param_groups[:] = [{**first, "params": [a, b, c]}, {**last, "params": [d]}]
    elif case == "swap" and in_place:
        first["params"][0], last["params"][0] = c, a
    elif case == "swap":
        optimizer.param_groups[:] = [{**first, "params": [c, b]}, {**last, "params": [a, d]}]
    elif case == "settings" and in_place:
        last["lr"] = 0.05
    elif case == "settings":
        optimizer.param_groups[:] = [first, {**last, "lr": 0.05}]
    elif in_place:
        first["params"].append(a)
    else:
        optimizer.add_param_group({"params": [a]})
    train(model, optimizer, range(4, 8))
    assert agree(model)
    return flat(model).clone()


def groups():
    for spec in (None, "dgc(density=0.5)", "signum()"):
        for case in ("move", "swap", "settings", "add"):
            one, two = (regrouped(spec, case, in_place) for in_place in (True, False))
            assert torch.equal(one, two), (spec, case, float((one - two).abs().max()))


def test_groups_that_are_changed_in_place_count_at_the_next_step(pool):
    pool.run(2, groups, timeout_s=180)


def moved_between(spec):
    model = DistributedDataParallel(net())
    a, b, c, d = model.parameters()
    first, second = (SGD(part, lr=0.1, momentum=0.9) for part in ([a, b], [c, d]))
    compress_anyway(model, [first, second], spec)
    for step in range(2):
        passed(model, step)
        for each in (first, second):
            each.step()
            each.zero_grad()
    first.param_groups[0]["params"].append(second.param_groups[0]["params"].pop())
    before = flat(model).clone()
    passed(model, 2)
    with pytest.raises(AttachError, match=r"2\.bias was moved to a different optimiser"):
        first.step()
    assert torch.equal(flat(model), before)


def test_a_parameter_that_changes_its_optimiser_is_noticed(pool):
    pool.run(2, moved_between, "signum()")


def late_group(spec):
    model = DistributedDataParallel(net())
    a, *others = model.parameters()
    optimizer = SGD(others, lr=0.1, momentum=0.9)
    compress_anyway(model, optimizer, spec)
    train(model, optimizer, range(2))
    before = flat(model).clone()
    optimizer.add_param_group({"params": [a], "dampening": 0.5})
    with pytest.raises(AttachError, match="dampening"):
        train(model, optimizer, range(2, 3))
    assert torch.equal(flat(model), before)


def test_a_late_group_with_settings_that_the_method_cannot_do_is_refused(pool):
    pool.run(2, late_group, "signum()")


def subclasses():
    adam = ("onebit_adam(warmup_steps=3)", "zero_one_adam(freeze_steps=3)")
    momentum = ("signum()",)
    cases = [(spec, kind) for spec in adam for kind in (SignAdamW, SignAdamW2)]
    cases += [(spec, kind) for spec in momentum for kind in (Negated, Clipping)]
    for spec, kind in cases:
        model = DistributedDataParallel(net())
        optimizer = kind(model.parameters(), lr=0.01)
        before = flat(model).clone()
        with pytest.raises(AttachError, match=rf"{kind.__name__} has a step of its own.*cgx\(\)"):
            laconic.compress(model, optimizer, spec)
        assert torch.equal(flat(model), before) and not optimizer._optimizer_step_pre_hooks, (spec, kind)
        laconic.compress(model, optimizer, "dense()")  # as the message says: any optimiser
        train(model, optimizer, range(4))
        plain = DistributedDataParallel(net())
        train(plain, kind(plain.parameters(), lr=0.01), range(4))
        assert torch.allclose(flat(model), flat(plain), atol=1e-6), (spec, kind)
    for spec, kind in (("dgc(density=0.5)", WithSettings), ("signum()", WithSettings)):
        model = DistributedDataParallel(net())
        optimizer = kind(model.parameters(), lr=0.01, momentum=0.9)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        compress_anyway(model, optimizer, spec)
        train(model, optimizer, range(2))


def test_a_subclass_with_a_step_of_its_own_is_refused_by_methods_that_do_the_step(pool):
    pool.run(2, subclasses)


def unfrozen():
    for spec in ("dense()", "topk(density=0.1)", "dgc(density=0.1)", "onebit_adam(warmup_steps=2)"):
        for when in ("before compress", "after compress", "new module", "new group"):
            plain = net()
            plain[2].weight.requires_grad_(False)
            model = DistributedDataParallel(plain)
            kind = AdamW if "adam" in spec else SGD
            held = (
                list(plain.parameters()) if when != "new group" else [*plain[0].parameters(), plain[2].bias]
            )
            optimizer = kind(held, lr=0.01)
            if when == "before compress":
                plain[2].weight.requires_grad_(True)
            compress_anyway(model, optimizer, spec)
            if when != "before compress":
                train(model, optimizer, range(2))
                assert agree(model)
                plain[2].weight.requires_grad_(True)
            if when == "new module":
                plain[2].weight.requires_grad_(False)
                plain[2] = nn.Linear(24, 4)
                optimizer.add_param_group({"params": list(plain[2].parameters())})
            if when == "new group":
                optimizer.add_param_group({"params": [plain[2].weight]})
            before = flat(model).clone()
            with pytest.raises(AttachError, match=r"2\.(weight|bias) was frozen or missing when"):
                train(model, optimizer, range(2, 3))
            assert torch.equal(flat(model), before), (spec, when)


def test_a_parameter_that_is_unfrozen_late_is_noticed_at_the_next_step(pool):
    pool.run(2, unfrozen)


def beside():
    """Parameters of a loss, and those in DDP's list of ignored ones."""
    plain, loss = net(), nn.Linear(4, 4)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(plain, ["2.bias"])
    model = DistributedDataParallel(plain)
    optimizer = sgd(nn.ModuleList([plain, loss]))
    laconic.compress(model, optimizer, "dense()")
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(torch.randn(4, 12))).sum().backward()
        optimizer.step()


def test_parameters_that_are_not_exchanged_by_intent_are_stepped(pool):
    pool.run(2, beside)


def two_sets():
    for spec in ("local_sgd(every=4)", "diloco(every=4)", "sgp()", "easgd()"):
        for make in (ScheduleFree, *OPAQUE):
            model = net()
            optimizer = ScheduleFree(model.parameters(), lr=0.1) if make is ScheduleFree else make(sgd(model))
            before = flat(model).clone()
            with pytest.raises(AttachError, match=r"second set of weights|a step of its own"):
                laconic.distribute(model, optimizer, spec)
            assert torch.equal(flat(model), before), (spec, make)
            given = optimizer if make is ScheduleFree else optimizer.inside
            assert not given._optimizer_step_pre_hooks, (spec, make)
    model, inner = net(), None
    inner = ScheduleFree(model.parameters(), lr=0.1)
    wrapped, optimizer = laconic.distribute(model, inner, "topk(density=0.1)")
    train(wrapped, optimizer, range(6))
    optimizer.finish()
    assert agree(wrapped)
    optimizer.eval()
    assert agree(wrapped) and callable(optimizer.train)
    optimizer.remove()
    plain = net()
    assert not hasattr(laconic.distribute(plain, sgd(plain, momentum=0.0), "sgp()")[1], "eval")


def test_an_optimiser_with_two_sets_of_weights_is_for_methods_alone(pool):
    pool.run(2, two_sets)


def slow_weights():
    for beside in (False, True):
        model = net()
        before = flat(model).clone()
        early = Ranger(model.parameters(), early=True, beside=beside, lr=0.01, momentum=0.9)
        with pytest.raises(AttachError, match="second set of weights in Ranger"):
            laconic.distribute(model, early, "local_sgd(every=2)")
        assert torch.equal(flat(model), before)
        late = Ranger(model.parameters(), early=False, beside=beside, lr=0.01, momentum=0.9)
        model, optimizer = laconic.distribute(model, late, "local_sgd(every=2)")
        late.register_step_post_hook(lambda *_: None)  # torch runs through several hooks
        with pytest.warns(UserWarning, match="seems to keep a second set of weights in Ranger") as caught:
            train(model, optimizer, range(8))
        assert len(caught) == 1
    for kind in (WithSettings, SignAdamW):  # momentum is no set of weights
        model = net()
        model, optimizer = laconic.distribute(model, kind(model.parameters(), lr=0.01), "local_sgd(every=2)")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(5):  # a gradient that equals the weights
                optimizer.zero_grad()
                sum(each.square().sum() / 2 for each in model.parameters()).backward()
                optimizer.step()


def test_slow_weights_are_refused_or_warned_of(pool):
    pool.run(2, slow_weights)


def wrapped_ones():
    for spec in ("topk(density=0.1)", "dgc(density=0.5)", "local_sgd(every=2)"):
        ends = []
        for wrap in (lambda inner: inner, *TRANSPARENT):
            model = net()
            if spec.startswith("local"):
                trained, optimizer = laconic.distribute(model, wrap(sgd(model)), spec)
            else:
                trained = DistributedDataParallel(model)
                optimizer = wrap(sgd(model))
                compress_anyway(trained, optimizer, spec)
            train(trained, optimizer, range(4))
            ends.append(flat(model).clone())
        assert all(torch.equal(ends[0], each) for each in ends), spec
    model = net()
    with pytest.raises(AttachError, match="a trainer's GradScaler"):
        laconic.distribute(model, TRANSPARENT[0](sgd(model), torch.amp.GradScaler("cpu")), "sgp()")
    with pytest.raises(AttachError, match=r"its \._optimizer"):
        laconic.compress(DistributedDataParallel(model), NoOptimizer(sgd(model)), "cgx()")


def test_wrappers_of_trainers_are_unwrapped_everywhere(pool):
    pool.run(2, wrapped_ones)


def around():
    """Wrappers: as plain DDP under methods that do not change the step, refused by others."""
    for kind in OPAQUE:
        ends = []
        for spec in (None, "dense()"):
            model = DistributedDataParallel(net())
            optimizer = kind(sgd(model))
            if spec:
                laconic.compress(model, optimizer, spec)
                with pytest.raises(AttachError, match="compressed already"):
                    laconic.compress(DistributedDataParallel(net()), optimizer.inside, spec)
            for step in range(4):
                passed(model, step)
                if kind is SAM:
                    optimizer.first_step()
                    passed(model, step)
                    optimizer.second_step()
                else:
                    optimizer.step()
                    optimizer.zero_grad()
            ends.append(flat(model).clone())
        assert torch.allclose(*ends, atol=1e-6), kind
        for method in ("onebit_adam()", "signum()"):
            model = DistributedDataParallel(net())
            with pytest.raises(AttachError):
                laconic.compress(model, kind(sgd(model)), method)
    model = DistributedDataParallel(net())
    sam = SAM(sgd(model))
    laconic.compress(model, sam, "dense()")
    (model(torch.ones(2, 12)).sum() * float("inf")).backward()
    with pytest.raises(NonFiniteError):
        sam.second_step()


def test_wrappers_work_with_methods_that_do_not_change_the_step(pool):
    pool.run(2, around)


def zero():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    for spec in ("rigl(density=0.3, every=4)", "static_masks(density=0.3)"):
        for wrap in (
            lambda m: ZeroRedundancyOptimizer(m.parameters(), SGD, lr=0.1),
            lambda m: Lookahead(sgd(m)),
        ):
            model = DistributedDataParallel(net())
            before, optimizer = copy.deepcopy(flat(model)), wrap(model)
            with pytest.raises(AttachError, match="has a step of its own"):
                laconic.sparsity.sparsify(model, optimizer, spec, steps=40)
            assert torch.equal(flat(model), before)


def test_sharded_optimiser_states_are_refused_by_masks(pool):
    pool.run(2, zero)


def idle():
    for spec in ("dense()", "local_sgd(every=4)"):
        model = net()
        given = sgd(model)
        if spec == "dense()":
            trained = DistributedDataParallel(model)
            laconic.compress(trained, given, spec)
        else:
            trained, _ = laconic.distribute(model, given, spec)
        other = sgd(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(trained, other, range(PASSES + 5))
        warned = [str(each.message) for each in caught if "backward passes" in str(each.message)]
        assert len(warned) == 1 and "something else steps them" in warned[0] and spec in warned[0], spec


def test_a_method_that_sees_no_step_warns_once(pool):
    pool.run(2, idle)
