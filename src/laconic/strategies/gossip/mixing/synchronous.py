"""Synchronous gossip, one round per step."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.comm.metered import Metered
from laconic.strategies.gossip.mixing import Mixing, Weights
from laconic.strategies.gossip.mixing.messages import MessageBuffers, add_received_, mix_, subtract_sent_
from laconic.strategies.gossip.mixing.push_sum import PushSum
from laconic.strategies.gossip.topologies import Topology
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import Notes, Update


class Gossip(PushSum):
    """Update, then mixing. `weighted`: whether weights are sent; else all are 1."""

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
        self._buffers = MessageBuffers(replica.flat, wire)
        self._landing: list[Tensor] = []

    def step_(self, update: Update, loss: float | None) -> None:
        swap = self._swap_in_place if self._in_place else self._swap_messages
        with self.numerator() as x:
            update()
            with self.comm.phase("gossip"):
                swap(x, self.shares(self.steps))

    def shares(self, step: int) -> Weights:
        return self.mixing(self.topology, self.comm.rank, self.comm.size, step)

    def _swap_in_place(self, x: Tensor, shares: Weights) -> None:
        while len(self._landing) < len(shares.into):
            self._landing.append(torch.empty_like(x))
        came = dict(zip(shares.into, self._landing, strict=False))
        self.comm.exchange(dict.fromkeys(shares.out, x), came)
        mix_(x, shares.own, came, shares.into)

    def _swap_messages(self, x: Tensor, shares: Weights) -> None:
        sent = self._buffers.sent
        sent.write(x, float(self.weight))
        going = dict.fromkeys(shares.out, sent.packed)
        self.comm.exchange(
            going, {rank: message.packed for rank, message in self._buffers.coming(shares).items()}
        )
        subtract_sent_(x, self.weight, sent, shares)
        add_received_(x, self.weight, self._buffers, shares)
        if not self._weighted:
            self.weight.fill_(1.0)  # removes rounding errors

    def notes(self) -> Notes:
        peers = sorted(self.shares(self.steps - 1).out) if self.steps else []
        return {"weight": float(self.weight), "peers": peers}
