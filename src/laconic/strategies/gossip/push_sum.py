"""PushSum: a numerator x and a weight w on every rank, whose sums over ranks gossip keeps.

    z_i = x_i / w_i, which tends to (sum_j x_j) / (sum_j w_j) on every rank

Kempe et al. 2003. Between steps a replica's parameters are z; the optimiser works on x = w z.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.metered import Metered
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy


class PushSum(BoundStrategy):
    """A replica with a `weight`, float64 (), at first 1."""

    def __init__(self, replica: Replica, comm: Metered) -> None:
        super().__init__(replica, comm)
        self.weight = torch.ones((), dtype=torch.float64)

    def consensus(self, aside: Comm) -> Tensor:
        """Sum of x over sum of w: the average that PushSum keeps."""
        total = aside.all_reduce(self.replica.flat * float(self.weight))
        return total.div_(float(aside.all_reduce(self.weight.clone().view(1))))

    def adopt_(self, model: Tensor) -> None:
        super().adopt_(model)
        self.weight.fill_(1.0)

    def state_dict(self) -> dict[str, Tensor]:
        return {"weight": self.weight}
