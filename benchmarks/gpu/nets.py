"""Small models and training loops that the checks of groups use."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer


def small_net() -> nn.Sequential:
    """Two convolutions with batch norms and two dense layers, for images of 16 x 16: 270,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 64, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def batch(rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return 32 random images and labels of a rank."""
    rng = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(32, 3, 16, 16, generator=rng)
    return x.to(device), torch.randint(0, 10, (32,), generator=rng).to(device)


def optimizer_for(model: nn.Module, spec: str) -> Optimizer:
    """Return SGD with momentum, or Adam for the methods that replace it."""
    if "adam" in spec:
        return Adam(model.parameters(), lr=1e-3)
    return SGD(model.parameters(), lr=0.02, momentum=0.9)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    rank: int,
    device: torch.device,
    steps: int = 12,
    dtype: torch.dtype | None = None,
    scaler: Any = None,
) -> list[float]:
    """Train on one batch, and return the first and the last loss."""
    x, y = batch(rank, device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = functional.cross_entropy(model(x), y)
        if scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    return [round(losses[0], 4), round(losses[-1], 4)]


def digest(tensors: Any) -> str:
    """Return a hash of the bits of tensors: equal on ranks whose replicas are equal."""
    flat = torch.cat([each.detach().float().flatten() for each in tensors]).cpu()
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
