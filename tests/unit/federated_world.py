"""A small model, clients whose training is a pure function, and a server of them."""

from __future__ import annotations

import torch
from torch import nn

from laconic.core.turn import mix

SHAPES = {"first.weight": (40, 30), "first.bias": (40,), "second.weight": (8, 40)}


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}
    tensors["norm.running_mean"] = torch.randn(5, generator=rng)
    tensors["norm.num_batches_tracked"] = torch.tensor(3)
    return tensors


def train(client: int, tensors: dict[str, torch.Tensor], number: int) -> tuple[dict[str, torch.Tensor], int]:
    """A step that depends on the client, the round and the model."""
    rng = torch.Generator().manual_seed(mix(client, number) >> 1)
    trained = {
        name: value + 1
        if not value.is_floating_point()
        else 0.99 * value + 0.1 * torch.randn(value.shape, generator=rng)
        for name, value in tensors.items()
    }
    return trained, 10 + client


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in SHAPES)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))
