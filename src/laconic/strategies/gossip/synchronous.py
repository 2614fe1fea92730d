"""One round of gossip a step, which every rank waits for: SGP and D-PSGD are this with other weights."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.comm.metered import Metered
from laconic.strategies.gossip.messages import Mail, give_, mix_, take_
from laconic.strategies.gossip.mixing import Mixing, Weights
from laconic.strategies.gossip.push_sum import PushSum
from laconic.strategies.gossip.topology import Topology
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import Notes, Update


class Gossip(PushSum):
    """Update, then mix with the peers of this step. `weighted`: weights travel; otherwise all stay 1."""

    def __init__(
        self,
        topology: Topology,
        mixing: Mixing,
        replica: Replica,
        comm: Metered,
        *,
        weighted: bool,
        wire: str = "fp32",
    ) -> None:
        super().__init__(replica, comm)
        self.topology, self.mixing = topology, mixing
        self._weighted = weighted
        self._in_place = wire == "fp32" and not weighted
        self._mail = Mail(replica.flat, wire)
        self._landing: dict[int, Tensor] = {}

    def step_(self, update: Update, loss: float | None) -> None:
        swap = self._swap_in_place if self._in_place else self._swap_messages
        with self.numerator() as x:
            update()
            with self.comm.phase("gossip"):
                swap(x, self.shares(self.steps))

    def shares(self, step: int) -> Weights:
        """What this rank keeps, sends and gets at a step."""
        return self.mixing(self.topology, self.comm.rank, self.comm.size, step)

    def _swap_in_place(self, x: Tensor, shares: Weights) -> None:
        for rank in shares.into:
            if rank not in self._landing:
                self._landing[rank] = torch.empty_like(x)
        came = {rank: self._landing[rank] for rank in shares.into}
        self.comm.exchange(dict.fromkeys(shares.out, x), came)
        mix_(x, shares.own, came, shares.into)

    def _swap_messages(self, x: Tensor, shares: Weights) -> None:
        sent = self._mail[self.comm.rank]
        sent.write(x, float(self.weight))
        going = dict.fromkeys(shares.out, sent.packed)
        self.comm.exchange(going, {rank: self._mail[rank].packed for rank in shares.into})
        give_(x, self.weight, sent, shares)
        take_(x, self.weight, self._mail, shares)
        if not self._weighted:
            self.weight.fill_(1.0)  # it is but for rounding

    def notes(self) -> Notes:
        peers = sorted(self.shares(self.steps - 1).out) if self.steps else []
        return {"weight": float(self.weight), "peers": peers}
