"""Sparse training beside what else acts on a step: masters, a GradScaler, frozen layers, a resume."""

from __future__ import annotations

import pytest
import torch
from tests.unit.test_rigl import batch, mlp, run
from torch import nn

from laconic.core.errors import StateError
from laconic.optim import master_weights
from laconic.optim.master_weights import masters_of
from laconic.sparsity import sparsify
from laconic.sparsity.slots import slots

SPECS = [
    "rigl(density=0.2, every=3)",
    "sparse_evolution(density=0.2, every=3)",
    "gradual_pruning(density=0.2, every=3)",
    "static_masks(density=0.2)",
]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("first", ["masks", "masters"])
@pytest.mark.parametrize("spec", SPECS)
def test_masters_and_their_slots_are_masked(spec, first, rounding) -> None:
    net = mlp().to(torch.bfloat16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
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
            out = ~sparse.masks[name]
            kept = [weight, masters_of(optimizer).of(weight), *slots(optimizer, weight)]
            assert not any(bool(each[out].any()) for each in kept if each is not None)
            assert all(each.dtype is torch.float32 for each in slots(optimizer, weight))
    if "static" not in spec:
        assert sparse.updates >= 2
    assert all(bool(weight.any()) for weight in held.values())


@pytest.mark.parametrize("spec", SPECS)
def test_a_layer_that_is_frozen_later_stays_as_it_is(spec) -> None:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sparse = sparsify(net, optimizer, spec, steps=60)
    run(net, optimizer, range(4))
    net[2].weight.requires_grad_(False)
    before, mask = net[2].weight.clone(), sparse.masks["2.weight"].clone()
    run(net, optimizer, range(4, 40))
    assert torch.equal(net[2].weight, before) and torch.equal(sparse.masks["2.weight"], mask)


class WithSpare(nn.Module):
    """A net with a layer that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = mlp(), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def test_rigl_leaves_a_layer_without_gradient_alone() -> None:
    net = WithSpare()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sparse = sparsify(net, optimizer, SPECS[0], steps=60)
    before = net.spare.weight.clone()
    run(net, optimizer, range(30))
    assert sparse.updates > 5 and torch.equal(net.spare.weight, before)


@pytest.mark.parametrize("fused", [False, True])
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


@pytest.mark.parametrize("spec", SPECS[:2])
def test_a_model_that_is_loaded_before_it_is_sparse_is_refused(spec) -> None:
    """The first masks have set its weights to zero by then."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sparse = sparsify(net, optimizer, spec, steps=60)
    run(net, optimizer, range(10))
    saved = {name: value.clone() for name, value in net.state_dict().items()}
    other = mlp(seed=3)
    other.load_state_dict(saved)
    again = sparsify(other, torch.optim.SGD(other.parameters(), lr=0.1), spec, steps=60)
    with pytest.raises(StateError, match="load the model's and the optimiser's states after that"):
        again.load_state_dict(sparse.state_dict())
    assert again.turn == 0
    other.load_state_dict(saved)
    again.load_state_dict(sparse.state_dict())
    assert all(torch.equal(one, two) for one, two in zip(net.parameters(), other.parameters(), strict=True))
