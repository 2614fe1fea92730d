"""Periods: which steps of a rank are followed by a meeting, by its own count or by the count of all.

    each    every rank's every `length`-th step
    total   the last `size` of every size * length steps that all ranks do together: each rank's next step,
            once the others of these are done

In `total` a fast rank goes on while a slow one has not done its share, and waits for no more than the step
that the slow one is in. Teng et al. 2019, arXiv:1905.10395; in the authors' code a server counts, every
worker asks it before each step, and after size * length steps the next answer to each is to communicate.
Here a counter numbers steps as they are done, and the steps that meetings follow are part of the total, so
that ranks in lockstep meet where `each` has them meet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.comm.comm import Comm


class Periods(ABC):
    """One rank's view. `met`: meetings until now."""

    met = 0

    @abstractmethod
    def step(self, done: int) -> bool:
        """This rank has done its step number `done`. True where a meeting follows: all ranks have come."""

    @abstractmethod
    def rest(self) -> bool:
        """Wait for the others. True where they meet, and this rank with them; False when all rest."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Where in a period all are, after `rest`."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Go on there, after so many steps of this rank. Called by all ranks."""


class EachPeriods(Periods):
    """By its own steps, which are as many as those of the others."""

    def __init__(self, length: int) -> None:
        self._length = length

    def step(self, done: int) -> bool:
        self.met = done // self._length
        return done % self._length == 0

    def rest(self) -> bool:
        return False

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        self.met = steps // self._length


class TotalPeriods(Periods):
    """By the steps of all. A rank that rests, as one that is done does, takes part in meetings.

    Wire: the counter is asked at each step; at each meeting an all-reduce of 16 bytes. `device`: where small
    tensors lie.
    """

    def __init__(self, length: int, comm: Comm, device: torch.device) -> None:
        self._alone = comm.size * (length - 1)  # steps of a period that no meeting follows
        self._comm, self._device = comm, device
        self._counter = comm.counter()
        self._began, self._last = 0, -1  # numbers of the period's first step, and of this rank's last
        self._done = 0  # steps of this period, by all; as of the last `rest`

    def step(self, done: int) -> bool:
        self._last = self._counter.add(1) - 1
        return self._last - self._began >= self._alone and self._gather(stepping=True)

    def rest(self) -> bool:
        return self._gather(stepping=False)

    def _gather(self, stepping: bool) -> bool:
        """Wait for all; whether anybody is stepping."""
        mine = torch.tensor([self._last, stepping], device=self._device)
        last, anybody = self._comm.all_reduce(mine, "max").tolist()
        if anybody:
            self.met += 1
            self._began = last + 1
        self._done = last + 1 - self._began
        return bool(anybody)

    def state_dict(self) -> dict[str, Tensor]:
        return {"periods": torch.tensor([self.met, self._done])}

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        self.met, self._done = state["periods"].tolist()
        self._counter = self._comm.counter()
        self._began, self._last = -self._done, -1
