"""Transforms of training (few bits, sparsity, coded activations) on the stand-in device, as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from laconic import kernels, lowbit, sparsity
from laconic.activations import session
from tests.device import device
from tests.device.worlds import CPU, GPU
from tests.laws.table import same

STEPS = 3
Block = Callable[[nn.Module], AbstractContextManager[Any]]
CANNOT = {  # of what these modules offer
    "lowbit.Packed*, sparsity.export": "their kernels are for the CPU alone",
    "lowbit.admm": "its model is solved on the host, layer by layer",
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 16),
        nn.Tanh(),
        nn.Linear(16, 4),
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(step)
    return torch.randn(6, 3, 8, 8, generator=rng), torch.randint(0, 4, (6,), generator=rng)


def trained(transform: str, on: torch.device) -> dict[str, Tensor]:
    """The state of a model after some steps."""
    model, act = net().to(on), TRANSFORMS[transform]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    made = act(model, optimizer)
    if isinstance(made, nn.Module):
        model = made
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    block: Block = made if transform.startswith("activations") else lambda _: nullcontext()
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        with block(model):
            loss = F.cross_entropy(model(x.to(on)), y.to(on))
        loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def activations(spec: str) -> Callable[..., Block]:
    return lambda _, optimizer: lambda model: laconic.activations.compress(model, spec, optimizer)


TRANSFORMS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "lowbit.convert(bits=8)": lambda model, _: lowbit.convert(model, 8),
    "lowbit.convert(bits=4, stochastic)": lambda model, _: lowbit.convert(model, 4, rounding="stochastic"),
    "lowbit.binarise": lambda model, _: lowbit.binarise(model),
    "lowbit.binarise(stochastic, shift)": lambda model, _: lowbit.binarise(
        model, stochastic=True, norm="shift"
    ),
    "lowbit.quantise": lambda model, _: lowbit.quantise(model),
    "sparsity.rigl": lambda model, optimizer: sparsity.rigl(model, optimizer, 0.3, steps=9, every=2),
    "sparsity.swat": lambda model, _: sparsity.swat(model, 0.5, refresh=2),
    "activations comet": activations("comet()"),
    "activations blocks": activations("blocks()"),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_training_is_that_of_the_cpu(transform: str) -> None:
    plain = mock.patch.object(session, "Tensor", device.Gpu)  # activations code plain tensors alone
    with kernels.using("reference"):
        expected = trained(transform, CPU)
        with plain:
            found = trained(transform, GPU)
    assert found.keys() == expected.keys()
    elsewhere = [name for name, value in found.items() if value.device != GPU and value.dim()]
    assert not elsewhere
    differing = [name for name, value in found.items() if not same(value.cpu(), expected[name])]
    assert not differing
