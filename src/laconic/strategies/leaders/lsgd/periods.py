"""Periods: the steps of a rank after which an election follows, by its own count or by the total.

    each    every `length`-th step of every rank
    total   the last `size` of every size * length steps of all ranks: each rank's next step, once the
            others of these are done

Teng et al. 2019, arXiv:1905.10395. In the authors' code a server asks for an election after size * length
steps. Here ranks in lockstep have elections at the same steps as with `each`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.comm.comm import Comm


class Periods(ABC):
    met = 0

    @abstractmethod
    def step(self, done: int) -> bool:
        """Count step `done` of this rank. Return whether an election follows."""

    @abstractmethod
    def rest(self) -> bool:
        """Wait for the others. Return whether an election follows; False when all rest."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return the position in the period, after `rest`."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Restore the position. Called by all ranks."""


class EachPeriods(Periods):
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
    """Counter of the steps of all ranks. A finished rank still joins elections."""

    def __init__(self, length: int, comm: Comm, device: torch.device) -> None:
        self._alone = comm.size * (length - 1)  # steps without an election
        self._comm, self._device = comm, device
        self._counter = comm.counter()
        self._began, self._last = 0, -1  # first step of the period, last of this rank
        self._done = 0  # steps of all in this period, at the last `rest`

    def step(self, done: int) -> bool:
        self._last = self._counter.add(1) - 1
        return self._last - self._began >= self._alone and self._gather(stepping=True)

    def rest(self) -> bool:
        return self._gather(stepping=False)

    def _gather(self, stepping: bool) -> bool:
        mine = torch.tensor([self._last, stepping], device=self._device, dtype=torch.int64)
        last, anybody = self._comm.all_reduce(mine, "max").tolist()
        if anybody:
            self.met += 1
            self._began = last + 1
        self._done = last + 1 - self._began
        return bool(anybody)

    def state_dict(self) -> dict[str, Tensor]:
        return {"periods": torch.tensor([self.met, self._done], dtype=torch.int64, device="cpu")}

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        self.met, self._done = state["periods"].tolist()
        self._counter = self._comm.counter()
        self._began, self._last = -self._done, -1
