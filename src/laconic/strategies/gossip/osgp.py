"""Overlap SGP: SGP whose messages are sent during the computation of the next steps.

    x_i <- LocalOpt(x_i, g_i)      at every step, with the gradient at z_i = x_i / w_i; every `staleness`:
    x_i += sum of the pending round,  w_i += its weights
    send P_ji x_i, P_ji w_i to the out-peers j, and keep P_ii of both

Assran et al. 2019, arXiv:1811.10792. Messages in flight make w differ from 1 on any graph; with theirs, all
weights sum to the number of ranks. The authors' code adds a round as soon as it arrives; here it has a fixed
step, so that every run has the same bits. A rank that is late by less than `staleness` steps delays no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.comm import Comm
from laconic.comm.communication_thread import Answer, CommunicationThread
from laconic.comm.metered import Metered
from laconic.core import arguments
from laconic.core.errors import PeerError
from laconic.core.spec import Status
from laconic.strategies.gossip.mixing import Weights, uniform
from laconic.strategies.gossip.mixing.debias import check_debiased
from laconic.strategies.gossip.mixing.gossip_strategy import GossipStrategy
from laconic.strategies.gossip.mixing.messages import (
    MessageBuffers,
    add_received_,
    check_wire,
    subtract_sent_,
)
from laconic.strategies.gossip.mixing.push_sum import PushSum
from laconic.strategies.gossip.topologies import Topology
from laconic.strategies.gossip.topologies.exponential import Exponential
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import Notes, Update


@dataclass(frozen=True, repr=False)
class OSGP(GossipStrategy):
    """SGP that sends every `staleness` steps, and adds the received messages as many steps later.

    Wire, per out-peer and round: n parameters of 4 or 2 bytes, and 8 bytes of weight.

    Args:
        topology: Directed edges; default: exponential().
        staleness: Steps between rounds, 1 or more; default: 1.
        wire: Type of the sent parameters: "fp32" (default), "fp16" or "bf16".

    Raises:
        SpecError: An argument is outside its range.
    """

    topology: Topology = field(default_factory=Exponential)
    staleness: int = 1
    wire: str = "fp32"

    name: ClassVar[str] = "osgp"
    paper: ClassVar[str] = "Assran et al. 2019, arXiv:1811.10792"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "facebookresearch/stochastic_gradient_push"
    examples: ClassVar[tuple[str, ...]] = ("osgp()", "osgp(staleness=4)")

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.whole("osgp: staleness", self.staleness, 1, hint="sgp() does not overlap")
        check_wire(self.wire)

    @property
    def period(self) -> int:
        return self.staleness

    @property
    def overlaps(self) -> bool:
        return True

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        check_debiased(self, optimizer)

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundOSGP:
        return BoundOSGP(self, replica, comm)


@dataclass(frozen=True)
class PendingRound:
    shares: Weights
    arrival: Answer


class BoundOSGP(PushSum):
    def __init__(self, config: OSGP, replica: Replica, comm: Metered) -> None:
        super().__init__(replica, comm)
        self.config = config
        self.rounds = 0
        self.pending: PendingRound | None = None
        self.buffers = MessageBuffers(replica.flat, config.wire)
        self._fifo = CommunicationThread(f"gossip of rank {comm.rank}", replica.flat.device)

    def step_(self, update: Update, loss: float | None) -> None:
        with self.numerator() as x:
            update()
            if self.steps % self.config.staleness == 0:
                self._receive(x)
                self._send(x)

    def _send(self, x: Tensor) -> None:
        shares = uniform(self.config.topology, self.comm.rank, self.comm.size, self.rounds)
        sent = self.buffers.sent
        sent.write(x, float(self.weight))
        subtract_sent_(x, self.weight, sent, shares)
        going = dict.fromkeys(shares.out, sent.packed)
        coming = {rank: message.packed for rank, message in self.buffers.coming(shares).items()}

        def swap() -> Tensor:
            with self.comm.phase("gossip"):
                self.comm.exchange(going, coming)
            return sent.packed

        self.pending = PendingRound(shares, self._fifo.submit(swap))
        self.rounds += 1

    def _receive(self, x: Tensor) -> None:
        self.add_pending_(x, self.weight)
        self.pending = None

    def add_pending_(self, x: Tensor, weight: Tensor) -> None:
        if self.pending is None:
            return
        try:
            self.pending.arrival.wait()
        except RuntimeError as error:
            raise PeerError(str(error)) from error
        add_received_(x, weight, self.buffers, self.pending.shares)

    def drain(self, side_comm: Comm) -> None:
        with self.numerator() as x:
            self._receive(x)

    def notes(self) -> Notes:
        sent = self.pending is not None and (self.steps - 1) % self.config.staleness == 0
        peers = sorted(self.pending.shares.out) if sent and self.pending else []
        return {"weight": float(self.weight), "staleness": self.config.staleness, "peers": peers}

    def state_dict(self) -> dict[str, Tensor]:
        return super().state_dict() | {"rounds": torch.tensor(self.rounds, dtype=torch.int64, device="cpu")}

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        super().load_state_dict(state, steps)
        self.rounds = int(state["rounds"])

    def close(self) -> None:
        self._fifo.end()
