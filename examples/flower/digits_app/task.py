"""The net, its data, which needs no download, and a client's training."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate

EXAMPLES = 400  # of each client


def net() -> nn.Module:
    """85,002 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def examples(seed: int, count: int = EXAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    """Drawings of ten signs, 8 x 8, moved by up to one pixel, faded and noisy: (n, 64) and labels (n,)."""
    signs = interpolate(torch.randn(10, 1, 4, 4, generator=torch.Generator().manual_seed(1)), size=8)[:, 0]
    rng = torch.Generator().manual_seed(1000 + seed)
    labels = torch.randint(0, 10, (count,), generator=rng)
    moves = torch.randint(-1, 2, (count, 2), generator=rng).tolist()
    drawn = [
        signs[label].roll((down, right), (0, 1))
        for label, (down, right) in zip(labels.tolist(), moves, strict=True)
    ]
    faded = 0.5 + torch.rand(count, 1, 1, generator=rng)
    noisy = torch.stack(drawn) * faded + 0.7 * torch.randn(count, 8, 8, generator=rng)
    return noisy.flatten(1), labels


def train(model: nn.Module, seed: int, epochs: int, order: int) -> float:
    """Train in place on one client's examples, in an order of the round's own. Returns the last loss."""
    inputs, labels = examples(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rng = torch.Generator().manual_seed(order)
    loss = torch.zeros(())
    for _ in range(epochs):
        for batch in torch.randperm(len(inputs), generator=rng).split(32):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs[batch]), labels[batch])
            loss.backward()
            optimizer.step()
    return float(loss.detach())


def accuracy(model: nn.Module) -> float:
    """On 2000 examples that no client has."""
    inputs, labels = examples(-1, 2000)
    with torch.no_grad():
        return float((model(inputs).argmax(1) == labels).float().mean())
