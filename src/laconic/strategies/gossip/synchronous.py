"""One round of gossip a step, which every rank waits for: SGP and D-PSGD are this with other weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.metered import Metered
from laconic.strategies.gossip.messages import Message, mix_
from laconic.strategies.gossip.mixing import Mixing, Weights
from laconic.strategies.gossip.topology import Topology
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Notes, Update


class Gossip(BoundStrategy):
    """Update, then mix with the peers of this round. `weighted`: PushSum weights travel and are divided out.

    Between steps the parameters are the de-biased z = x / w; the optimiser works on x = w z, with the gradient
    at z.
    """

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
        self.weight = torch.ones((), dtype=torch.float64)
        self._weighted = weighted
        self._wire = wire
        self._plain = wire == "fp32" and not weighted
        self._mail: dict[int, Message] = {}  # by sender; this rank's own is what it sends
        self._landing: dict[int, Tensor] = {}

    def step_(self, update: Update, loss: float | None) -> None:
        x = self.replica.flat
        self._times_(x, float(self.weight))
        update()
        shares = self.mixing(self.topology, self.comm.rank, self.comm.size, self.steps)
        with self.comm.phase("gossip"):
            if self._plain:
                self._swap_in_place(x, shares)
            else:
                self._swap_messages(x, shares)
        self._times_(x, 1 / float(self.weight))

    def _times_(self, x: Tensor, factor: float) -> None:
        if factor != 1.0:
            x.mul_(factor)

    def _swap_in_place(self, x: Tensor, shares: Weights) -> None:
        came = {rank: self._landing_of(rank) for rank in shares.into}
        self.comm.exchange(dict.fromkeys(shares.out, x), came)
        mix_(x, shares.own, came, shares.into)

    def _swap_messages(self, x: Tensor, shares: Weights) -> None:
        sent = self._message_of(self.comm.rank)
        sent.write(x, float(self.weight))
        came = {rank: self._message_of(rank) for rank in shares.into}
        self.comm.exchange(
            dict.fromkeys(shares.out, sent.packed), {rank: each.packed for rank, each in came.items()}
        )
        absorb_(x, self.weight, sent, came, shares)

    def _landing_of(self, rank: int) -> Tensor:
        if rank not in self._landing:
            self._landing[rank] = torch.empty_like(self.replica.flat)
        return self._landing[rank]

    def _message_of(self, rank: int) -> Message:
        if rank not in self._mail:
            self._mail[rank] = Message(self.replica.flat, self._wire)
        return self._mail[rank]

    def consensus(self, aside: Comm) -> Tensor:
        """Sum of x over sum of w: the average that PushSum conserves."""
        total = aside.all_reduce(self.replica.flat * float(self.weight))
        weight = float(aside.all_reduce(self.weight.clone().view(1)))
        return total.div_(weight)

    def adopt_(self, model: Tensor) -> None:
        super().adopt_(model)
        self.weight.fill_(1.0)

    def notes(self) -> Notes:
        shares = self.mixing(self.topology, self.comm.rank, self.comm.size, max(0, self.steps - 1))
        return {"weight": float(self.weight), "peers": sorted(shares.out)}

    def state_dict(self) -> dict[str, Tensor]:
        return {"weight": self.weight}


def give_(x: Tensor, weight: Tensor, sent: Message, shares: Weights) -> None:
    """Take out of x and its weight what `sent`, to all out-peers, carries away: in float32, nothing is lost.

    What rounding to the wire's type leaves stays here.
    """
    away = sum(shares.out.values())
    x.sub_(sent.x, alpha=away)
    weight.mul_(1.0 - away)


def take_(x: Tensor, weight: Tensor, came: Mapping[int, Message], shares: Weights) -> None:
    """Add what has come, in rank order."""
    for rank in sorted(came):
        x.add_(came[rank].x, alpha=shares.into[rank])
        weight.add_(came[rank].weight * shares.into[rank])


def absorb_(
    x: Tensor, weight: Tensor, sent: Message, came: Mapping[int, Message], shares: Weights
) -> None:
    """Give what was sent and take what has come: one whole round."""
    give_(x, weight, sent, shares)
    take_(x, weight, came, shares)
