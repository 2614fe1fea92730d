"""Sparse training beside what else acts on a step: masters, a GradScaler, frozen layers, a resume."""

from __future__ import annotations

import copy

import torch
from tests.unit.shared import for_each, refuses, same
from tests.unit.test_rigl import batch, mlp, run
from torch import nn

from laconic.comm.loopback import Loopback
from laconic.core.errors import StateError
from laconic.core.layout import Layout
from laconic.core.mask import Mask
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.optim import master_weights
from laconic.optim.master_weights import masters_of
from laconic.sparsity import sparsify
from laconic.sparsity.slots import slots

MOVING = ("rigl", "sparse_evolution", "gradual_pruning")
SPECS = [*(f"{name}(density=0.2, every=3)" for name in MOVING), "static_masks(density=0.2)"]


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


@for_each("rounding, first", [("nearest", "masks"), ("stochastic", "masters"), ("stochastic", "masks")])
@for_each("spec", SPECS)
def test_masters_and_their_slots_are_masked(spec, first, rounding) -> None:
    net = mlp().to(torch.bfloat16)
    optimizer = momentum(net)
    if first == "masters":
        master_weights(optimizer, rounding=rounding)
    sparse = sparsify(net, optimizer, spec, steps=12)
    if first == "masks":
        master_weights(optimizer, rounding=rounding)
    held = {name: weight for name, weight in net.named_parameters() if name in sparse.masks}
    for step in range(12):
        optimizer.zero_grad()
        x, y = batch(step)
        nn.functional.cross_entropy(net(x.to(torch.bfloat16)).float(), y).backward()
        optimizer.step()
        for name, weight in held.items():
            out, found = ~sparse.masks[name], slots(optimizer, weight)
            kept = [weight, masters_of(optimizer).of(weight), *found]
            assert not any(bool(each[out].any()) for each in kept if each is not None)
            assert all(each.dtype is torch.float32 for each in found)
    assert "static" in spec or sparse.updates >= 2
    assert all(bool(weight.any()) for weight in held.values())


@for_each("spec", SPECS)
def test_a_layer_that_is_frozen_later_or_has_no_gradient_stays_as_it_is(spec) -> None:
    net = WithSpare()
    optimizer = momentum(net)
    sparse = sparsify(net, optimizer, spec, steps=60)
    spare, frozen = net.spare.weight.clone(), net.net[2].weight
    run(net, optimizer, range(4))
    frozen.requires_grad_(False)
    before, mask = frozen.clone(), sparse.masks["net.2.weight"].clone()
    run(net, optimizer, range(4, 30))
    assert torch.equal(frozen, before) and torch.equal(sparse.masks["net.2.weight"], mask)
    if spec.startswith("rigl"):
        assert sparse.updates > 5 and torch.equal(net.spare.weight, spare)


class WithSpare(nn.Module):
    """A net with a layer that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = mlp(), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@for_each("fused", [False, True])
def test_a_step_that_a_scaler_skips_does_not_count(fused) -> None:
    """A fused optimiser skips it itself, after the hooks before the step."""
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, fused=fused)
    sparse = sparsify(net, optimizer, "rigl(density=0.2, every=4, accumulate=2)", steps=40)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(9):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(batch(step)[0]), batch(step)[1])
        scaler.scale(loss * (float("inf") if step in (3, 4) else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert sparse.turn == 7 and sparse.updates == 2
    assert all(bool(weight.isfinite().all()) for weight in net.parameters())


@for_each("spec", SPECS[:2])
def test_a_model_that_is_loaded_before_it_is_sparse_is_refused(spec) -> None:
    """The first masks have set its weights to zero by then."""
    net, other = mlp(), mlp(seed=3)
    optimizer = momentum(net)
    sparse = sparsify(net, optimizer, spec, steps=60)
    run(net, optimizer, range(10))
    saved = copy.deepcopy(net.state_dict())
    other.load_state_dict(saved)
    again = sparsify(other, momentum(other), spec, steps=60)
    words = r"load the states of model and optimiser after sparsify"
    refuses(StateError, words, again.load_state_dict, sparse.state_dict())
    assert again.turn == 0
    other.load_state_dict(saved)
    again.load_state_dict(sparse.state_dict())
    assert same(net.parameters(), other.parameters())


def test_masked_keeps_a_loaded_state_through_a_skipped_first_step() -> None:
    """The state has values for entries that the present masks leave out: its masks may be loaded later."""
    layout, weight = Layout.of([("w", (4, 5))]), torch.zeros(4, 5)
    mask = Mask.of(weight, torch.arange(20).view(4, 5) % 2 == 0)

    def body(comm: Loopback) -> bool:
        bound = parse("masked(server(sparse(topk(density=0.5)), sparse(topk(density=0.5))))").bind(
            layout, comm
        )
        bound.remask({"w": mask})
        state = {key: torch.ones(4, 5) for key, value in bound.state_dict().items() if value.dim() == 2}
        state = bound.state_dict() | state
        bound.load_state_dict(state)
        assert bound.reduce(None, layout, Turn(0, comm.rank, 0), torch.zeros(20)) is None
        bound.put_back(layout)
        kept = bound.state_dict()
        return bool(state) and all(torch.equal(kept[key], value) for key, value in state.items())

    found = Loopback.run(2, body)
    assert found[0] and any(found)
