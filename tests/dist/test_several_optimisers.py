"""`laconic.distribute` with a list of optimisers: they are stepped, saved and scheduled as one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import laconic
from laconic.core.errors import AttachError, StateError
from tests.dist.distribute_world import go, resumed
from tests.dist.nets import agree, flat, loss_of, momentum_for, net

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


def both_ways(spec):
    ends = []
    for apart in (True, False):
        model, optimizer = together(spec, apart)
        rates = LambdaLR(optimizer, lambda step: 0.5**step)
        for step in range(5):
            go(model, optimizer, [step])
            rates.step()
        with optimizer.averaged():
            shown = flat(model).clone()
        optimizer.finish()
        ends.append((flat(model).clone(), shown, [group["lr"] for group in optimizer.param_groups]))
        assert agree(model) and optimizer.stats().steps == 5
        optimizer.remove()
    (one, shown_one, rates_one), (other, shown_other, rates_other) = ends
    return torch.equal(one, other), torch.equal(shown_one, shown_other), rates_one == rates_other


@pytest.mark.parametrize("spec", SPECS)
def test_two_optimisers_do_what_one_with_two_groups_does(pool, spec):
    assert pool.run(2, both_ways, spec) == [(True, True, True)] * 2


def muon_and_adamw(spec):
    model = net()
    matrices, rest = halves(model)
    optimizers = (torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01))
    return laconic.distribute(model, optimizers, spec)


def stop_and_go(spec):
    (whole, whole_optimizer), (model, optimizer) = resumed(lambda: muon_and_adamw(spec), go, 6, 4)
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
    ],
)
def test_muon_beside_adamw_is_saved_and_goes_on(pool, spec, held):
    assert pool.run(2, stop_and_go, spec) == [(True, True, held), (True, True, 0)]


def one_of_two(spec):
    """A step in which only the vectors have gradients, as of one of a GAN's two nets."""
    model, optimizer = together(spec, apart=True)
    go(model, optimizer, [0])
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
    return moved


def test_an_optimiser_without_gradients_does_nothing(pool):
    assert pool.run(2, one_of_two, "local_sgd(every=1)") == [[False, True]] * 2


def scaled(spec):
    model, optimizer = together(spec, apart=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.finish()
    return agree(model) and bool(torch.isfinite(flat(model)).all())


def test_a_grad_scaler_steps_all(pool):
    assert pool.run(2, scaled, "sgp()") == [True, True]


def late_group():
    """A group that is added to one of them is stepped too."""
    model = net()
    matrices, rest = halves(model)
    first, second = torch.optim.SGD(matrices, lr=0.05), torch.optim.SGD(rest[:2], lr=0.05)
    model, optimizer = laconic.distribute(model, [first, second], "local_sgd(every=1)")
    with pytest.raises(AttachError, match="the one that is to hold"):
        optimizer.add_param_group({"params": rest[2:]})
    second.add_param_group({"params": rest[2:]})
    before = rest[-1].detach().clone()
    go(model, optimizer, [0])
    seen = len(optimizer.param_groups)
    optimizer.remove()
    return seen, not torch.equal(before, rest[-1])


def test_a_group_is_added_to_one_of_them(pool):
    assert pool.run(2, late_group) == [(3, True)] * 2


def refusals():
    said = []
    model = net()
    matrices, rest = halves(model)
    muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)
    for optimizers, spec in (
        ([], "sgp()"),
        ([muon, torch.optim.SGD(matrices[:1], lr=0.1)], "sgp()"),
        ([muon, adamw], "lpdt()"),
        ([muon, adamw], "onebit_adam()"),
    ):
        with pytest.raises(AttachError) as caught:
            laconic.distribute(model, optimizers, spec)
        said.append(str(caught.value))
    model, optimizer = laconic.distribute(model, [muon, adamw], "sgp()")
    state = optimizer.state_dict()
    step = copy.deepcopy(adamw.state_dict())
    for wrong in ({**state, "several": state["several"][:1]}, {"laconic": state["laconic"], **step}):
        with pytest.raises(StateError) as caught:
            optimizer.load_state_dict(wrong)
        said.append(str(caught.value))
    optimizer.remove()
    return said


def test_what_cannot_be_is_refused_with_the_way_out(pool):
    for said in pool.run(2, refusals):
        none, shared, momentum, adam, fewer, plain = said
        assert "no optimiser" in none and "give each its own" in shared
        assert "lpdt" in momentum and "Muon" in momentum
        assert "got Muon" in adam
        assert "of 1 optimiser(s), here are 2" in fewer and "here are 2" in plain
