"""Dense gradients of masked weights, the score of new entries: summed over passes, turns and ranks.

DistributedDataParallel averages only masked gradients. If several turns count, norms remove GradScaler's
factor:

    norm = sqrt(sum over ranks and weights of |g|^2),  score = sum over turns and ranks of g / norm
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.comm.comm import Comm


class PendingGradient(NamedTuple):
    """`first`: of the step; `total`: sum of pending ones."""

    first: bool
    dense: Tensor
    total: Tensor


class DenseGradients:
    """Float32 sums by weight; `turns`: since the last update."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self.turns: dict[str, Tensor] = {}
        self._passes: dict[str, Tensor] = {}
        self._pending: dict[str, PendingGradient] = {}

    def record(self, name: str, grad: Tensor) -> None:
        """Record a gradient, which counts only if added to the weight's: not for `autograd.grad`."""
        held, earlier = self._weights[name].grad, self._pending.get(name)
        first = held is None or not bool(held.any())
        dense = grad.detach().to(torch.float32, copy=True)
        total = dense if first or earlier is None else earlier.total + dense
        self._pending[name] = PendingGradient(first, dense, total)

    def accumulate_hook(self, name: str) -> Callable[[Tensor], None]:
        def added(weight: Tensor) -> None:
            if coming := self._pending.pop(name, None):
                before = None if coming.first else self._passes.get(name)
                self._passes[name] = coming.dense if before is None else before + coming.dense

        return added

    def _collect_assigned(self) -> None:
        """Count gradients that a script or torch pipeline assigned directly."""
        for name, coming in self._pending.items():
            if name not in self._passes and self._weights[name].grad is not None:
                self._passes[name] = coming.total
        self._pending.clear()

    def finish_step(self, counts: bool, comm: Comm | None) -> None:
        """Add or discard the step's gradients, on all ranks."""
        self._collect_assigned()
        if counts:
            self._normalise(comm)
        for name, dense in self._passes.items() if counts else ():
            self.turns[name] = self.turns[name] + dense if name in self.turns else dense
        self._passes.clear()

    def skip_step(self) -> None:
        self._passes.clear()
        self._pending.clear()

    def total(self, comm: Comm | None, several: bool) -> dict[str, Tensor]:
        """Return flat sums over ranks. `several`: with earlier turns. Called by all ranks."""
        self._collect_assigned()
        if several:
            self._normalise(comm)
        parts = []
        for name, weight in self._weights.items():
            total = torch.zeros_like(weight, dtype=torch.float32, memory_format=torch.contiguous_format)
            for found in (self.turns, self._passes):
                if name in found:
                    total += found[name]
            parts.append(total.flatten())
        flat = torch.cat(parts)
        if comm is not None:
            comm.all_reduce(flat)
        views = torch.split(flat, [part.numel() for part in parts])
        return dict(zip(self._weights, views, strict=True))

    def _normalise(self, comm: Comm | None) -> None:
        here = next(iter(self._weights.values())).device
        total = torch.zeros(1, dtype=torch.float64, device=here)
        for dense in self._passes.values():
            total += dense.double().square().sum().to(here)
        if comm is not None:
            comm.all_reduce(total)
        norm = float(total.sqrt())
        if norm > 0:
            self._passes = {name: dense / norm for name, dense in self._passes.items()}

    def clear(self) -> None:
        self.turns.clear()
        self._passes.clear()
        self._pending.clear()
