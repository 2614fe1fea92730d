"""`laconic.distribute` with a list of optimisers: they are stepped, saved and scheduled as one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import laconic
from laconic.core.errors import AttachError, StateError
from tests.dist.nets import agree, flat, loss_of, momentum_for, net
from tests.dist.pool import on_ranks
from tests.dist.runs import advance, resumed, scaled_step

SPECS = [
    "sgp()",
    "osgp()",
    "local_sgd(every=2)",
    "slowmo(every=2)",
    "quasi_global(dpsgd())",
    "by_machine(local_sgd(every=2), ranks_per_node=1)",
    "topk(density=0.1)",
    "dgc(density=0.1)",
]


def halves(model):
    """Its matrices, and its vectors."""
    return [p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() != 2]


def together(spec, apart):
    """Two SGDs of different rates, or one with two groups."""
    model = net()
    groups = [{"params": half, "lr": lr} for half, lr in zip(halves(model), (0.05, 0.02), strict=True)]
    momentum = momentum_for(spec)
    if apart:
        optimizers = [torch.optim.SGD([group], momentum=momentum) for group in groups]
    else:
        optimizers = torch.optim.SGD(groups, momentum=momentum)
    return laconic.distribute(model, optimizers, spec)


@on_ranks(2, SPECS)
def test_two_optimisers_do_what_one_with_two_groups_does(spec):
    ends = []
    for apart in (True, False):
        model, optimizer = together(spec, apart)
        rates = LambdaLR(optimizer, lambda step: 0.5**step)
        for step in range(5):
            advance(model, optimizer, [step])
            rates.step()
        with optimizer.averaged():
            shown = flat(model).clone()
        optimizer.finish()
        ends.append((flat(model).clone(), shown, [group["lr"] for group in optimizer.param_groups]))
        assert agree(model) and optimizer.stats().steps == 5
        optimizer.remove()
    (one, shown_one, rates_one), (other, shown_other, rates_other) = ends
    assert torch.equal(one, other) and torch.equal(shown_one, shown_other) and rates_one == rates_other


def muon_and_adamw(spec):
    model = net()
    matrices, rest = halves(model)
    muon = torch.optim.Muon(matrices, lr=0.02, nesterov=False)
    optimizers = (muon, torch.optim.AdamW(rest, lr=0.01))
    return laconic.distribute(model, optimizers, spec)


def stop_and_go(spec):
    (whole, whole_optimizer), (model, optimizer) = resumed(lambda: muon_and_adamw(spec), advance, 6, 4)
    gathered = optimizer.state_dict(gather=True)
    optimizer.load_state_dict(optimizer.state_dict())
    held = len(gathered["optimizers"])
    same, moved = torch.equal(flat(whole), flat(model)), not torch.equal(flat(whole), flat(net()))
    for each in (whole_optimizer, optimizer):
        each.remove()
    return same, moved, held


@pytest.mark.parametrize(
    ("spec", "held"),
    [
        ("sgp()", 2),
        ("diloco(every=2)", 2),
        ("diloco(every=5, fragments=2, overlap=1, mix=0.5)", 2),
        ("sparseloco(every=2)", 2),
        ("topk(density=0.1)", 1),
        ("dion2()", 1),
    ],
)
def test_muon_beside_adamw_is_saved_and_goes_on(pool, spec, held):
    assert pool.run(2, stop_and_go, spec) == [(True, True, held), (True, True, 0)]


@on_ranks(2)
def test_step_hooks_are_those_of_each_optimiser():
    model, optimizer = together("local_sgd(every=2)", apart=True)
    seen = []
    hooks = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
    ]
    advance(model, optimizer, [0])
    assert seen == ["before", "after"] * 2
    for hook in hooks:
        hook.remove()
    advance(model, optimizer, [1])
    assert len(seen) == 4
    optimizer.remove()


@on_ranks(2)
def test_an_optimiser_without_gradients_does_nothing():
    spec = "local_sgd(every=1)"
    model, optimizer = together(spec, apart=True)
    advance(model, optimizer, [0])
    optimizer.finish()
    before = [[p.detach().clone() for p in half] for half in halves(model)]
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    for each in halves(model)[0]:
        each.grad = None
    optimizer.step()
    optimizer.finish()
    moved = [
        any(not torch.equal(a, b) for a, b in zip(old, new, strict=True))
        for old, new in zip(before, halves(model), strict=True)
    ]
    optimizer.remove()
    assert moved == [False, True]


@on_ranks(2)
def test_a_grad_scaler_steps_all():
    spec = "sgp()"
    model, optimizer = together(spec, apart=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        optimizer.zero_grad()
        scaled_step(scaler, optimizer, loss_of(model, step))
    optimizer.finish()
    assert agree(model) and bool(torch.isfinite(flat(model)).all())


@on_ranks(2)
def test_a_group_is_added_to_one_of_them():
    model = net()
    matrices, rest = halves(model)
    first, second = torch.optim.SGD(matrices, lr=0.05), torch.optim.SGD(rest[:2], lr=0.05)
    model, optimizer = laconic.distribute(model, [first, second], "local_sgd(every=1)")
    with pytest.raises(AttachError, match="the one that shall hold"):
        optimizer.add_param_group({"params": rest[2:]})
    second.add_param_group({"params": rest[2:]})
    before = rest[-1].detach().clone()
    advance(model, optimizer, [0])
    seen = len(optimizer.param_groups)
    optimizer.remove()
    assert seen == 3 and (not torch.equal(before, rest[-1]))


@on_ranks(2)
def test_what_cannot_be_is_refused_with_the_way_out():
    model = net()
    matrices, rest = halves(model)
    muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)
    sgd = torch.optim.SGD(matrices[:1], lr=0.1)
    for optimizers, spec, words in (
        ([], "sgp()", "no optimiser"),
        ([muon, sgd], "sgp()", "pass it to one"),
        ([muon, adamw], "lpdt()", "(?s)lpdt.*Muon|Muon.*lpdt"),
        ([muon, adamw], "onebit_adam()", "got Muon"),
    ):
        with pytest.raises(AttachError, match=words):
            laconic.distribute(model, optimizers, spec)
    model, optimizer = laconic.distribute(model, [muon, adamw], "sgp()")
    state = optimizer.state_dict()
    fewer = {**state, "several": state["several"][:1]}
    plain = {"laconic": state["laconic"], **copy.deepcopy(adamw.state_dict())}
    for wrong, words in ((fewer, r"has 1 optimiser\(s\), here are 2"), (plain, "here are 2")):
        with pytest.raises(StateError, match=words):
            optimizer.load_state_dict(wrong)
    optimizer.remove()
