"""PushSum: a numerator x and a weight w on every rank; gossip keeps their sums over ranks.

    z_i = x_i / w_i, which tends to (sum_j x_j) / (sum_j w_j) on every rank

Kempe et al. 2003. Between steps a replica's parameters are z; the optimiser works on x = w z.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.metered import Metered
from laconic.strategies.gossip.mixing.messages import scale_
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy


class PushSum(BoundStrategy):
    def __init__(self, replica: Replica, comm: Metered) -> None:
        super().__init__(replica, comm)
        self.weight = torch.ones((), dtype=torch.float64, device="cpu")
        self.inside = False

    def consensus(self, side_comm: Comm) -> Tensor:
        x, weight = self.replica.flat * float(self.weight), self.weight.clone()
        self.add_pending_(x, weight)
        return side_comm.all_reduce(x).div_(float(side_comm.all_reduce(weight.view(1))))

    def add_pending_(self, x: Tensor, weight: Tensor) -> None:
        """Add pending messages to x and its weight."""

    def salvage(self) -> Tensor:
        """Return z: the parameters are x = w z inside a step."""
        return self.replica.flat / float(self.weight) if self.inside else self.replica.flat

    @contextmanager
    def numerator(self) -> Iterator[Tensor]:
        scale_(self.replica.flat, float(self.weight))
        self.inside = True
        yield self.replica.flat
        self.inside = False  # after an error, the parameters are still x
        scale_(self.replica.flat, 1 / float(self.weight))

    def adopt_(self, model: Tensor) -> None:
        super().adopt_(model)
        self.weight.fill_(1.0)

    def state_dict(self) -> dict[str, Tensor]:
        return {"weight": self.weight}
