"""AD-PSGD: every rank trains at its own pace and averages in pairs; no rank waits.

    on every rank, in its steps:            x_i <- x_i + the update at a copy of x_i from the step's start
    on an odd rank a, during its steps:     x_a, x_p <- (x_a + x_p) / 2, with a random even neighbour p

Lian et al. 2018, arXiv:1710.06952. Odd ranks ask and even ranks answer, as in the code of Assran et al. 2019,
so ranks cannot wait in a circle; but an odd rank draws its partner, as that code's schedule lets a slow rank
delay others. The sum over ranks is kept.

Messages go from host memory over gloo: with NCCL, a waiting answer would block all work on the GPU.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.at_exit import start_thread
from laconic.comm.comm import Comm
from laconic.comm.communication_thread import Answer, CommunicationThread, drop_traceback
from laconic.comm.metered import Metered
from laconic.core import arguments
from laconic.core.errors import LaconicError, PeerError, SpecError
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.strategies.gossip.mixing.gossip_strategy import GossipStrategy
from laconic.strategies.gossip.mixing.messages import ParameterMessage, check_wire
from laconic.strategies.gossip.topologies import Topology, reach
from laconic.strategies.gossip.topologies.complete import Complete
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Notes, Update

AVERAGE, CLOSE = 1.0, 0.0  # requests, in the place of a message's weight


@dataclass(frozen=True, repr=False)
class ADPSGD(GossipStrategy):
    """Average in pairs without a barrier, along the edges of `topology` between odd and even ranks.

    An even rank has a thread for each odd rank that may ask it. No two runs are equal.

    Wire, every `every` steps of an odd rank, each way: n parameters of 4 or 2 bytes, and 8 bytes.

    Args:
        topology: Pairs of ranks that may average; default: complete().
        wire: Type of the sent parameters: "fp32" (default), "fp16" or "bf16".
        every: Steps of an odd rank between requests, which wait for a pending answer; default: 1.

    Raises:
        SpecError: An argument is outside its range.
    """

    topology: Topology = field(default_factory=Complete)
    wire: str = "fp32"
    every: int = 1

    name: ClassVar[str] = "adpsgd"
    paper: ClassVar[str] = "Lian et al. 2018, arXiv:1710.06952"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "facebookresearch/stochastic_gradient_push"
    examples: ClassVar[tuple[str, ...]] = ("adpsgd()", "adpsgd(wire='bf16', every=4)")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wire(self.wire)
        arguments.whole("adpsgd: every", self.every, 1)

    @property
    def clocked(self) -> bool:
        return True

    @property
    def overlaps(self) -> bool:
        return True

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        links = [set(neighbours(self.topology, rank, size)) for rank in range(size)]
        if lost := sorted(set(range(size)) - reach(links)):
            raise SpecError(
                f"adpsgd: odd ranks ask and even ranks answer, but along such edges of {self.topology!r} no"
                f" path leads from rank 0 to rank {lost[0]}: use complete() or ring()"
            )

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundADPSGD:
        return BoundADPSGD(self, replica, comm, seed)


def neighbours(topology: Topology, rank: int, size: int) -> list[int]:
    met = (topology.peers(rank, size, step) for step in topology.span(size))
    others = {other for peers in met for other in (*peers.out, *peers.into)}
    return sorted(other for other in others if (other - rank) % 2)


class BoundADPSGD(BoundStrategy):
    """AD-PSGD on one rank.

    `shared` float32 (n,): x at the start of this step. `moved` float32 (n,): change by averaging since then.
    Other ranks see their sum, read and changed under `_lock`.
    """

    def __init__(self, config: ADPSGD, replica: Replica, comm: Metered, seed: int) -> None:
        super().__init__(replica, comm)
        self.config = config
        self.seed = seed
        self.shared = replica.flat.clone()
        self.moved = torch.zeros_like(replica.flat)
        self.averages = 0
        self._unmoved = True
        self._lock = threading.Lock()
        self._peers = neighbours(config.topology, comm.rank, comm.size)
        self._partner: int | None = None
        self._pending: Answer | None = None
        self.error: Exception | None = None
        self._asker = CommunicationThread(f"gossip of rank {comm.rank}") if comm.rank % 2 else None
        self.ending = threading.Event()
        known = weakref.ref(self)  # the threads keep no model alive
        self._answerers = [
            start_thread(partial(answer_all, known, peer), f"answers rank {peer}", end=self.ending.set)
            for peer in ([] if self._asker else self._peers)
        ]

    def step_(self, update: Update, loss: float | None) -> None:
        if self.error is not None:
            raise PeerError(f"rank {self.comm.rank}: gossip has ended: {self.error}") from self.error
        update()
        self._start_step()
        self._partner = None
        free = self._pending is None or self._pending.done()
        if self._asker is not None and free and self.steps % self.config.every == 0:
            self._wait_for_average()
            choice = Turn(self.steps, self.comm.rank, self.seed).own("partner") % len(self._peers)
            self._partner = self._peers[choice]
            self._pending = self._asker.submit(partial(self._ask, self._partner))

    def _ask(self, peer: int) -> Tensor:
        going, coming = self.message(), self.message()
        with self._lock:
            self._write(going)
        self.comm.exchange({peer: going.packed}, {peer: coming.packed})
        with self._lock:
            self._move_(coming, going)
        return coming.packed

    def answer_(self, coming: ParameterMessage, going: ParameterMessage) -> None:
        with self._lock:
            self._write(going)
            self._move_(coming, going)

    def _move_(self, received: ParameterMessage, sent: ParameterMessage) -> None:
        """Move halfway to the other rank. The caller holds `_lock`."""
        device = self.moved.device
        self.moved.add_(received.x.to(device), alpha=0.5).sub_(sent.x.to(device), alpha=0.5)
        self._unmoved = False
        self.averages += 1

    def _write(self, going: ParameterMessage) -> None:
        going.write(self.shared + self.moved, AVERAGE)

    def message(self) -> ParameterMessage:
        return ParameterMessage(self.shared, self.config.wire, torch.device("cpu"))

    def _start_step(self) -> None:
        x = self.replica.flat
        with self._lock:
            if not self._unmoved:
                x.add_(self.moved)
                self.moved.zero_()
                self._unmoved = True
            self.shared.copy_(x)

    def _wait_for_average(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.wait()
            except RuntimeError as error:
                raise PeerError(str(error)) from error

    def drain(self, side_comm: Comm) -> None:
        """Load the shared model, once no odd rank asks."""
        self._wait_for_average()
        side_comm.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"))
        self._start_step()

    def consensus(self, side_comm: Comm) -> Tensor:
        self.drain(side_comm)
        return super().consensus(side_comm)

    def salvage(self) -> Tensor:
        with self._lock:
            return self.shared + self.moved

    def adopt_(self, model: Tensor) -> None:
        self._start_at(model)
        self.replica.flat.copy_(model)

    def notes(self) -> Notes:
        return {"rounds": self.averages, "peers": [] if self._partner is None else [self._partner]}

    def state_dict(self) -> dict[str, Tensor]:
        return {"shared": self.shared}

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        super().load_state_dict(state, steps)
        self._start_at(self.shared)

    def _start_at(self, model: Tensor) -> None:
        with self._lock:
            self.shared.copy_(model)
            self.moved.zero_()
            self._unmoved = True

    def close(self) -> None:
        if self._asker is not None:
            last = self.message()
            last.write(self.shared, CLOSE)
            for peer in self._peers:
                self._asker.submit(partial(self._send, peer, last))
            self._asker.close()
        for thread in self._answerers:
            thread.join()

    def abandon(self) -> None:
        self.ending.set()
        if self._asker is not None:
            self._asker.end()

    def _send(self, peer: int, message: ParameterMessage) -> Tensor:
        self.comm.exchange({peer: message.packed}, {})
        return message.packed


def answer_all(known: weakref.ref[BoundADPSGD], peer: int) -> None:
    bound = known()
    if bound is None:
        return
    comm, ending = bound.comm, bound.ending
    going, coming = bound.message(), bound.message()
    del bound
    try:
        while not ending.is_set():
            comm.exchange({}, {peer: coming.packed})
            bound = known()
            if bound is None or coming.weight == CLOSE:
                return
            bound.answer_(coming, going)
            del bound
            comm.exchange({peer: going.packed}, {})
    except LaconicError as error:
        drop_traceback(error)
        if (bound := known()) is not None:
            bound.error = error
