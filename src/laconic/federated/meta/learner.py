"""Small network for all agents at once: row i of weights and gradients is agent i's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.federated.meta.tasks import Batch

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Mlp:
    """Dense layers with ReLU between them; flat weights, (in, out) before bias (out,).

    >>> Mlp((1, 40, 40, 1)).layout.numel
    1761
    """

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.widths) < 2:
            raise SpecError(f"widths must have at least an input and an output, got {self.widths}")
        for width in self.widths:
            arguments.whole("widths", width, 1)

    @cached_property
    def layout(self) -> Layout:
        tensors: list[tuple[str, tuple[int, ...]]] = []
        for i, (inside, outside) in enumerate(pairwise(self.widths)):
            tensors += [(f"{i}.weight", (inside, outside)), (f"{i}.bias", (outside,))]
        return Layout.of(tensors)

    def first(self, seed: int = 0) -> Tensor:
        """Draw initial weights, float32 (n,), as `torch.nn.Linear` does."""
        rng = torch.Generator("cpu").manual_seed(seed)
        bounds = [1 / math.sqrt(inside) for inside, _ in pairwise(self.widths) for _ in range(2)]
        parts = [
            bound * (2 * torch.rand(entry.numel, generator=rng, dtype=torch.float32, device="cpu") - 1)
            for entry, bound in zip(self.layout, bounds, strict=True)
        ]
        return torch.cat(parts)

    def __call__(self, weights: Tensor, x: Tensor) -> Tensor:
        """Return outputs (a, b, out) of weights (a, n) and inputs (a, b, in)."""
        parts = torch.split(weights, [entry.numel for entry in self.layout], dim=1)
        for i, (inside, outside) in enumerate(pairwise(self.widths)):
            matrix = parts[2 * i].view(-1, inside, outside)
            x = torch.baddbmm(parts[2 * i + 1].unsqueeze(1), x if i == 0 else functional.relu(x), matrix)
        return x


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """Return mean squared errors (a,) of (a, b, o)."""
    return (outputs - y).square().mean(dim=(1, 2))


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Return mean cross-entropies (a,) in nats of logits (a, b, classes) and labels (a, b)."""
    return functional.cross_entropy(outputs.transpose(1, 2), y, reduction="none").mean(dim=1)


@dataclass(frozen=True)
class Learner:
    network: Mlp
    loss: Loss = squared_error

    def losses(self, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return each agent's loss, (a,), of weights (a, n)."""
        return self.loss(self.network(weights, x), y)

    def gradients(self, weights: Tensor, x: Tensor, y: Tensor, *, create_graph: bool = False) -> Tensor:
        """Return each agent's gradient, (a, n)."""
        if not weights.requires_grad:
            weights = weights.detach().requires_grad_()
        with torch.enable_grad():
            total = self.losses(weights, x, y).sum()
            made: Tensor = torch.autograd.grad(total, weights, create_graph=create_graph)[0]
            return made

    def meta_gradients(
        self,
        first: Tensor,
        support: Batch,
        query: Batch,
        steps: int,
        lr: float,
    ) -> Tensor:
        """Return d f(w - lr grad f(w; support) - ...; query) / dw per agent, (a, n)."""
        weights = start = first.detach().requires_grad_()
        with torch.enable_grad():
            for _ in range(steps):
                weights = weights - lr * self.gradients(weights, *support, create_graph=True)
            made: Tensor = torch.autograd.grad(self.losses(weights, *query).sum(), start)[0]
            return made

    def first_order(
        self,
        first: Tensor,
        support: Batch,
        query: Batch,
        steps: int,
        lr: float,
    ) -> Tensor:
        """Return the query's gradients (a, n) after the inner steps."""
        weights = first
        for _ in range(steps):
            weights = weights - lr * self.gradients(weights, *support)
        return self.gradients(weights, *query)


def clipped(gradients: Tensor, most: float | None) -> Tensor:
    if most is None:
        return gradients
    norms = gradients.norm(dim=1, keepdim=True)
    made: Tensor = gradients * (most / norms.clamp(min=most))
    return made
