"""Overlap SGP: SGP whose messages travel while the next steps are computed.

    x_i <- LocalOpt(x_i, g_i)      at every step, with the gradient at z_i = x_i / w_i; every `staleness`:
    x_i += sum of the round under way,  w_i += its weights
    send P_ji x_i, P_ji w_i to the out-peers j, and keep P_ii of both

Assran et al. 2019, arXiv:1811.10792. What is sent has left its sender before it arrives: so w differs from 1
on any graph, and the sum over ranks of w and of what is under way is the number of ranks. The authors' code
takes a round as soon as it has come; here it waits for its step, so that a run has the same bits each time.
A rank that is late by less than `staleness` steps holds nobody up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.comm import Comm
from laconic.comm.metered import Metered
from laconic.core import arguments
from laconic.core.errors import PeerError
from laconic.core.spec import Status
from laconic.strategies.fifo import Answer, Fifo
from laconic.strategies.gossip.debias import check_debiased
from laconic.strategies.gossip.messages import Mail, check_wire, give_, take_
from laconic.strategies.gossip.mixing import Weights, uniform
from laconic.strategies.gossip.push_sum import PushSum
from laconic.strategies.gossip.topologies.exponential import Exponential
from laconic.strategies.gossip.topology import Topology
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import Notes, Strategy, Update


@dataclass(frozen=True, repr=False)
class OSGP(Strategy):
    """SGP that sends every `staleness` steps, and takes what has come as many steps later.

    Wire, to each out-peer a round: n parameters as `wire` says, 4 or 2 bytes each, and 8 bytes of weight.
    """

    topology: Topology = field(default_factory=Exponential)
    staleness: int = 1
    wire: str = "fp32"

    name: ClassVar[str] = "osgp"
    paper: ClassVar[str] = "Assran et al. 2019, arXiv:1811.10792"
    status: ClassVar[Status] = "verified"
    examples: ClassVar[tuple[str, ...]] = ("osgp(staleness=4)",)

    def __post_init__(self) -> None:
        arguments.piece("osgp: topology", self.topology, Topology, "exponential()")
        arguments.whole("osgp: staleness", self.staleness, 1, way_out="sgp() does not overlap")
        check_wire(self.wire)

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        self.topology.check(size)
        check_debiased(self, optimizer)

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundOSGP:
        return BoundOSGP(self, replica, comm)


@dataclass(frozen=True)
class Round:
    """A round under way: by the Future's end the mail of these senders has come."""

    shares: Weights
    arrival: Answer


class BoundOSGP(PushSum):
    """Overlap SGP at work on one rank. `rounds`: how many it has sent."""

    def __init__(self, config: OSGP, replica: Replica, comm: Metered) -> None:
        super().__init__(replica, comm)
        self.config = config
        self.rounds = 0
        self.under_way: Round | None = None
        self.mail = Mail(replica.flat, config.wire)
        self._fifo = Fifo(f"gossip of rank {comm.rank}", replica.flat.device)

    def step_(self, update: Update, loss: float | None) -> None:
        with self.numerator() as x:
            update()
            if self.steps % self.config.staleness == 0:
                self._take(x)
                self._send(x)

    def _send(self, x: Tensor) -> None:
        """Send this rank's share to the out-peers of the next round, on the communication thread."""
        shares = uniform(self.config.topology, self.comm.rank, self.comm.size, self.rounds)
        sent = self.mail[self.comm.rank]
        sent.write(x, float(self.weight))
        give_(x, self.weight, sent, shares)
        going = dict.fromkeys(shares.out, sent.packed)
        coming = {rank: self.mail[rank].packed for rank in shares.into}

        def swap() -> Tensor:
            with self.comm.phase("gossip"):
                self.comm.exchange(going, coming)
            return sent.packed

        self.under_way = Round(shares, self._fifo.submit(swap))
        self.rounds += 1

    def _take(self, x: Tensor) -> None:
        """Add what has come with the round under way, if there is one."""
        self.add_under_way_(x, self.weight)
        self.under_way = None

    def add_under_way_(self, x: Tensor, weight: Tensor) -> None:
        if self.under_way is None:
            return
        try:
            self.under_way.arrival.wait()
        except RuntimeError as error:
            raise PeerError(str(error)) from error
        take_(x, weight, self.mail, self.under_way.shares)

    def settle(self, aside: Comm) -> None:
        with self.numerator() as x:
            self._take(x)

    def notes(self) -> Notes:
        sent = self.under_way is not None and (self.steps - 1) % self.config.staleness == 0
        peers = sorted(self.under_way.shares.out) if sent and self.under_way else []
        return {"weight": float(self.weight), "staleness": self.config.staleness, "peers": peers}

    def state_dict(self) -> dict[str, Tensor]:
        return super().state_dict() | {"rounds": torch.tensor(self.rounds)}

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        super().load_state_dict(state, steps)
        self.rounds = int(state["rounds"])

    def close(self) -> None:
        self._fifo.end()
