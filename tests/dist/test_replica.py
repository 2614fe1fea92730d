"""A rank's replica under `laconic.distribute`: frozen weights, memory formats, half precision, averages."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.core.errors import AttachError, StateError
from laconic.optim.master_weights import master_weights
from tests.dist.nets import agree, flat, loss_of, net
from tests.dist.pool import on_ranks
from tests.dist.runs import distributed


@on_ranks(2)
def test_frozen_parameters_begin_alike_too():
    """The first layer is frozen, the last one held by the optimiser as well."""
    model = net(seed=dist.get_rank())
    for frozen_one in (model[0].weight, model[-1].bias):
        frozen_one.requires_grad_(False)
    own = model[0].weight.clone()
    model, _ = laconic.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "local_sgd(every=9)")
    assert agree(model) and torch.equal(model[0].weight, own) == (dist.get_rank() == 0)


@on_ranks(1, product([torch.float32, torch.bfloat16], ["sgd", "adamw"]))
def test_fused_steps_of_channels_last_are_those_of_a_plain_optimiser(precision, kind):
    """Fused kernels go through memory, whatever the strides of a parameter, its gradient and its state."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3, bias=False).to(precision, memory_format=torch.channels_last)
    x = torch.randn(2, 3, 6, 6, dtype=precision)

    def build(model):
        held = model.parameters()
        sgd = kind == "sgd"
        made = torch.optim.SGD(held, lr=0.1, momentum=0.9, fused=True) if sgd else None
        made = made or torch.optim.AdamW(held, lr=0.1, fused=True)
        return made if precision == torch.float32 else master_weights(made)

    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()

    plain = build(model)
    train(model, plain, 3)
    state = copy.deepcopy(plain.state_dict())
    ends = []
    for loads_late in (False, True):
        other = copy.deepcopy(model)
        optimizer = build(other)
        if not loads_late:
            optimizer.load_state_dict(copy.deepcopy(state))
        other, tied = laconic.distribute(other, optimizer, "local_sgd(every=100)")
        if loads_late:
            tied.load_state_dict(copy.deepcopy(state) | {"laconic": tied.state_dict()["laconic"]})
        train(other, tied, 1)
        ends.append(other.weight.detach().clone())
    train(model, plain, 1)
    apart = [float((end - model.weight.detach()).abs().max()) for end in ends]
    assert max(apart) < (1e-6 if precision == torch.float32 else 1e-3)


@on_ranks(2, product([False, True], ["local_sgd(every=2)", "sgp()", "diloco(every=5)"]))
def test_what_a_script_writes_to_half_precision_stays(masters, spec):
    torch.manual_seed(0)
    model = net().to(torch.bfloat16)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = laconic.distribute(model, master_weights(plain) if masters else plain, spec)
    loads = []
    for ends in (optimizer.step, optimizer.finish, optimizer.state_dict):
        with torch.no_grad():
            for each in model.parameters():
                each.copy_(torch.full_like(each, 5.0 + len(loads)))
                each.grad = torch.zeros_like(each)
        ends()
        loads.append(flat(model).unique().tolist())
    assert loads == [[5.0], [6.0], [7.0]]


@on_ranks(2)
def test_an_error_inside_averaged_gives_the_own_weights_back():
    torch.manual_seed(0)
    model = net().to(torch.bfloat16)
    model, optimizer = laconic.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "local_sgd()")
    with torch.no_grad():
        model[0].weight.add_(dist.get_rank())
    loss_of_half = model(torch.ones(2, model[0].in_features, dtype=torch.bfloat16)).float().sum()
    loss_of_half.backward()
    optimizer.zero_grad()
    before = flat(model)
    with pytest.raises(KeyError), optimizer.averaged():
        assert not torch.equal(flat(model), before)
        raise KeyError
    assert torch.equal(flat(model), before)


@on_ranks(2)
def test_what_would_be_lost_inside_averaged_is_refused():
    model, optimizer = distributed("diloco(every=2)")
    loss_of(model, 0).backward()
    state = optimizer.state_dict()
    calls = (optimizer.step, optimizer.finish, optimizer.remove, lambda: optimizer.load_state_dict(state))
    with optimizer.averaged():
        for call in calls:
            with pytest.raises(StateError, match="exit it first"):
                call()
    optimizer.step()
    assert optimizer.stats().steps == 1


@on_ranks(1)
def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = net()
    with pytest.raises(AttachError, match=r"on the meta device.*to_empty"):
        laconic.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "local_sgd()")
