"""Dense gradients of masked weights, by which new entries are chosen: summed over passes, turns and ranks.

A hook on a gradient runs before DistributedDataParallel takes its mean over ranks, and what is masked never
gets there: so the sum over ranks is taken here, once for an update of the masks. Where several turns count,
each is divided by its norm over all weights and ranks: a GradScaler multiplies a turn's gradients by a factor
that changes, and that nobody knows here.

    norm = sqrt(sum over ranks and weights of |g|^2),  score = sum over turns and ranks of g / norm
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.comm.comm import Comm


class Coming(NamedTuple):
    """A gradient that may be added; whether it is the step's first, and the sum of those that were not."""

    first: bool
    dense: Tensor
    total: Tensor


class DenseGradients:
    """What counts for the next update, in float32, by the weight's name.

    `turns`: of the steps since the last update. Gradients of a step that is not taken, as a GradScaler's may
    be, leave no trace.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self.turns: dict[str, Tensor] = {}
        self._passes: dict[str, Tensor] = {}  # the backward passes since the last step
        self._coming: dict[str, Coming] = {}

    def note(self, name: str, grad: Tensor) -> None:
        """A pass has this gradient. It counts once it is added to the weight's: `autograd.grad` adds none."""
        held, earlier = self._weights[name].grad, self._coming.get(name)
        first = held is None or not bool(held.any())
        dense = grad.detach().to(torch.float32, copy=True)
        total = dense if first or earlier is None else earlier.total + dense
        self._coming[name] = Coming(first, dense, total)

    def after(self, name: str) -> Callable[[Tensor], None]:
        """The hook for when a pass has added what was noted last, if anything, to the weight's gradient."""

        def added(weight: Tensor) -> None:
            if coming := self._coming.pop(name, None):
                before = None if coming.first else self._passes.get(name)
                self._passes[name] = coming.dense if before is None else before + coming.dense

        return added

    def _assigned(self) -> None:
        """Take what no pass has added, where a script or a pipeline of torch has set the gradient itself."""
        for name, coming in self._coming.items():
            if name not in self._passes and self._weights[name].grad is not None:
                self._passes[name] = coming.total
        self._coming.clear()

    def stepped(self, counts: bool, comm: Comm | None) -> None:
        """The step is done; its gradients count for a later update, or not any more. Called by all ranks."""
        self._assigned()
        if counts:
            self._to_norm_1(comm)
        for name, dense in self._passes.items() if counts else ():
            self.turns[name] = self.turns[name] + dense if name in self.turns else dense
        self._passes.clear()

    def skipped(self) -> None:
        """The step was not taken."""
        self._passes.clear()
        self._coming.clear()

    def summed(self, comm: Comm | None, several: bool) -> dict[str, Tensor]:
        """All that counts, summed over the ranks of `comm`: flat, by name. Called by all of them.

        `several`: whether earlier turns count, which have norm 1.
        """
        self._assigned()
        if several:
            self._to_norm_1(comm)
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

    def _to_norm_1(self, comm: Comm | None) -> None:
        """Divide this turn's gradients by their norm over weights and ranks: 8 bytes a rank."""
        here = next(iter(self._weights.values())).device
        total = torch.zeros(1, dtype=torch.float64, device=here)
        for dense in self._passes.values():
            total += dense.double().square().sum().to(here)
        if comm is not None:
            comm.all_reduce(total)
        norm = float(total.sqrt())
        if norm > 0:
            self._passes = {name: dense / norm for name, dense in self._passes.items()}

    def forget(self) -> None:
        """Nothing counts any more."""
        self.turns.clear()
        self._passes.clear()
        self._coming.clear()
