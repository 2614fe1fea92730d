"""Shared implementation of MiCRO and ExDyna."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.messages import Sent
from laconic.core.errors import StateError
from laconic.core.layout import Layout, PerLayout
from laconic.core.selector import IndexCoding
from laconic.core.turn import Turn
from laconic.reducers import BoundReducer
from laconic.reducers.deft.borders import Borders
from laconic.reducers.deft.threshold_controller import BINS, ThresholdController, histogram
from laconic.reducers.deft.union import (
    ChoiceInParts,
    Found,
    Parts,
    average_,
    choices_of_all,
    message_nbytes,
    part_of,
)

CONTROLLER, BLOCKS = "once/threshold_controller/state", "once/borders/blocks"
Move = Callable[[Borders, Sequence[int]], Borders]


@dataclass(frozen=True, repr=False)
class ByThreshold(ChoiceInParts):
    def bind_parts(self, comm: Comm, borders: Borders, move: Move | None = None) -> BoundReducer:
        return ThresholdControlled(self.density, self.indices, comm, borders, move)

    def sparse_nbytes(self, layout: Layout) -> int:
        n = layout.numel
        return 4 * n + 4 * BINS + message_nbytes(n, n, len(layout), self.indices)


@dataclass(frozen=True)
class Choices:
    layout: Layout
    counts: Tensor  # chosen in each part, int64 (N,)
    sizes: Tensor | None  # histogram of all candidates, if a threshold is needed


class ThresholdControlled(BoundReducer):
    """Threshold and borders, equal on all ranks. They change between steps, by the number sent last.

    `move`: function from the number chosen in each part to new borders.
    """

    def __init__(
        self, density: float, coding: IndexCoding, comm: Comm, borders: Borders, move: Move | None = None
    ) -> None:
        self._density = density
        self._coding = coding
        self._comm = comm
        self._controller = ThresholdController()
        self._borders = borders
        self._move = move
        self._parts = PerLayout(lambda layout: self._borders.parts(layout))
        self._step = -1
        self._choices: dict[int, Choices] = {}

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        if self._step != turn.step:
            self._finish()
            self._step = turn.step
        parts, comm = self._parts(layout), self._comm
        home = part_of(comm.rank, turn.step, comm.size)
        found = None if x is None else self._choose(x, layout, parts, home, turn)
        union = choices_of_all(found, parts, turn.step, comm, self._coding, out.device)
        if x is None or union is None:
            return None
        sizes = None
        if not self._controller.threshold:
            sizes = comm.all_reduce(histogram(x, parts[home])).cpu()
        sent = average_(x, layout, parts.joined, union, comm, out, alpha)
        if sent is not None:
            counts = union[1].view(comm.size, len(layout)).sum(dim=1)
            self._choices[id(layout)] = Choices(layout, counts, sizes)
        return sent

    def _choose(self, x: Tensor, layout: Layout, parts: Parts, home: int, turn: Turn) -> Found:
        if self._controller.threshold:
            return kernels.above(
                x,
                parts[home],
                torch.full((len(layout),), self._controller.threshold, dtype=torch.float32, device="cpu"),
            )
        quotas = [
            quota(self._density, start - entry.offset, size, turn.common(entry.name))
            for entry, (start, size) in zip(layout, parts[home], strict=True)
        ]
        return kernels.topk(x, parts[home], torch.tensor(quotas, dtype=torch.int64, device="cpu"))

    def _finish(self) -> None:
        choices = list(self._choices.values())
        self._choices.clear()
        asked = self._density * sum(each.layout.numel for each in choices)
        if not asked:
            return
        counts: list[int] = torch.stack([each.counts for each in choices]).sum(dim=0).tolist()
        sizes = [each.sizes for each in choices if each.sizes is not None]
        if sizes:
            self._controller = self._controller.made(torch.stack(sizes).sum(dim=0), asked)
        else:
            self._controller = self._controller.after(sum(counts), asked)
        if self._move and (moved := self._move(self._borders, counts)) is not self._borders:
            self._borders = moved
            self._parts.clear()

    def writes_late(self, step: int) -> bool:
        return True

    def put_back(self, layout: Layout) -> None:
        self._choices.pop(id(layout), None)

    def state_dict(self) -> dict[str, Tensor]:
        self._finish()
        state = {CONTROLLER: self._controller.state}
        return {**state, BLOCKS: self._borders.state} if self._move else state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = self.state_dict()
        for key in sorted(own.keys() | state.keys()):
            shape = tuple(state[key].shape) if key in state else None
            if key not in own or shape != tuple(own[key].shape):
                raise StateError(
                    f"{key} has shape {shape} in the saved state: the state is of another method"
                )
        self._controller = ThresholdController.of(state[CONTROLLER])
        if self._move:
            self._borders = self._borders.of(state[BLOCKS])
            self._parts.clear()


def quota(density: float, start: int, size: int, key: int) -> int:
    """Return the number of entries to choose here, so that all parts of a tensor give density * n.

    `key`, common to the parts, decides the rounding.

    >>> sum(quota(0.25, start, 3, key=1 << 62) for start in range(0, 30, 3))
    7
    """
    chance = key / 2.0**64
    return min(size, math.floor(density * (start + size) + chance) - math.floor(density * start + chance))
