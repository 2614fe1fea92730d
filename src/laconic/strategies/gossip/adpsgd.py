"""AD-PSGD: every rank trains at its own pace, and averages with one other now and then; nobody waits.

    on every rank, at its steps:            x_i <- x_i + the update at a copy of x_i from when the step began
    on an odd rank a, beside its steps:     x_a, x_p <- (x_a + x_p) / 2, with an even neighbour p at random

Lian et al. 2018, arXiv:1710.06952; odd ranks ask and even ones answer, as in the code of Assran et al. 2019,
so that no two wait for each other in a circle. There the pairs follow a common schedule, and a slow rank
delays the pairs after its own; here an asker draws its partner, and an answerer serves all askers as they
come. Both ends move by half the difference of what they have exchanged, so the sum over ranks is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.comm import Comm
from laconic.comm.metered import Metered
from laconic.core import arguments
from laconic.core.errors import LaconicError, PeerError, SpecError
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.strategies.fifo import Answer, Fifo, let_go
from laconic.strategies.gossip.messages import Message, check_wire
from laconic.strategies.gossip.topologies.complete import Complete
from laconic.strategies.gossip.topology import Topology, reach
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Notes, Strategy, Update

AVERAGE, CLOSE = 1.0, 0.0  # what a message asks for, where others have a weight


@dataclass(frozen=True, repr=False)
class ADPSGD(Strategy):
    """Average in pairs without a barrier, along the edges of `topology` between odd and even ranks.

    An even rank has a thread for each odd one that may ask it; those of other parity never meet. `every`: an
    odd rank asks at every so many of its steps, unless it still waits for an answer.

    Wire, one exchange for each `every` steps of an odd rank, each way: n parameters as `wire` says, 4 or 2
    bytes each, and 8 bytes. Which step of one rank meets which of another depends on the clock: no two runs
    are alike.
    """

    topology: Topology = field(default_factory=Complete)
    wire: str = "fp32"
    every: int = 1

    name: ClassVar[str] = "adpsgd"
    paper: ClassVar[str] = "Lian et al. 2018, arXiv:1710.06952"
    status: ClassVar[Status] = "verified"
    examples: ClassVar[tuple[str, ...]] = ("adpsgd(wire='bf16', every=4)",)

    def __post_init__(self) -> None:
        arguments.piece("adpsgd: topology", self.topology, Topology, "complete()")
        check_wire(self.wire)
        arguments.whole("adpsgd: every", self.every, 1)

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        self.topology.check(size)
        links = [set(neighbours(self.topology, rank, size)) for rank in range(size)]
        if lost := sorted(set(range(size)) - reach(links)):
            raise SpecError(
                f"adpsgd: odd ranks ask and even ranks answer, and by such edges of {self.topology!r} no path"
                f" leads from rank 0 to rank {lost[0]}: take complete() or ring()"
            )

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundADPSGD:
        return BoundADPSGD(self, replica, comm, seed)


def neighbours(topology: Topology, rank: int, size: int) -> list[int]:
    """All of the other parity that a rank meets within a period, whichever of the two sends."""
    met = (topology.peers(rank, size, step) for step in topology.span(size))
    others = {other for peers in met for other in (*peers.out, *peers.into)}
    return sorted(other for other in others if (other - rank) % 2)


class BoundADPSGD(BoundStrategy):
    """AD-PSGD at work on one rank.

    `shared` float32 (n,): x when this step began; `moved` float32 (n,): by how much averages have moved it
    since. Others see their sum, under a lock. `met`: how often this rank has averaged.
    """

    def __init__(self, config: ADPSGD, replica: Replica, comm: Metered, seed: int) -> None:
        super().__init__(replica, comm)
        self.config = config
        self.seed = seed
        self.shared = replica.flat.clone()
        self.moved = torch.zeros_like(replica.flat)
        self.met = 0
        self._still = True  # `moved` is zero, and a step spends no time on it
        self._lock = threading.Lock()
        self._peers = neighbours(config.topology, comm.rank, comm.size)
        self._partner: int | None = None
        self._meeting: Answer | None = None
        self._error: Exception | None = None
        self._asker = Fifo(f"gossip of rank {comm.rank}") if comm.rank % 2 else None
        asking = [] if self._asker else self._peers
        self._answerers = [
            threading.Thread(target=self._answer_all, args=(peer,), name=f"answers rank {peer}", daemon=True)
            for peer in asking
        ]
        for thread in self._answerers:
            thread.start()

    def step_(self, update: Update, loss: float | None) -> None:
        if self._error is not None:
            raise PeerError(f"rank {self.comm.rank}: gossip has ended: {self._error}") from self._error
        update()
        self._take()
        self._partner = None
        free = self._meeting is None or self._meeting.done()
        if self._asker is not None and free and self.steps % self.config.every == 0:
            self._arrived()
            choice = Turn(self.steps, self.comm.rank, self.seed).own("partner") % len(self._peers)
            self._partner = self._peers[choice]
            self._meeting = self._asker.submit(partial(self._ask, self._partner))

    def _ask(self, peer: int) -> Tensor:
        """Average with an even rank. On the asker's thread."""
        going, coming = (Message(self.shared, self.config.wire) for _ in range(2))
        with self._lock:
            self._write(going)
        self.comm.exchange({peer: going.packed}, {peer: coming.packed})
        with self._lock:
            self._move_(coming, going)
        return coming.packed

    def _answer_all(self, peer: int) -> None:
        """Average with an odd rank whenever it asks, until it closes. A thread for each of these."""
        going, coming = (Message(self.shared, self.config.wire) for _ in range(2))
        try:
            while True:
                self.comm.exchange({}, {peer: coming.packed})
                if coming.weight == CLOSE:
                    return
                with self._lock:
                    self._write(going)
                    self._move_(coming, going)
                self.comm.exchange({peer: going.packed}, {})
        except LaconicError as error:
            self._error = error
            let_go(error)

    def _move_(self, came: Message, went: Message) -> None:
        """Half of the way to the other, under the lock."""
        self.moved.add_(came.x, alpha=0.5).sub_(went.x, alpha=0.5)
        self._still = False
        self.met += 1

    def _write(self, going: Message) -> None:
        """What others average with, under the lock."""
        torch.add(self.shared, self.moved, out=going.x)
        going.weight_cell.fill_(AVERAGE)

    def _take(self) -> None:
        """A new step begins where the update and the averages have led."""
        x = self.replica.flat
        with self._lock:
            if not self._still:
                x.add_(self.moved)
                self.moved.zero_()
                self._still = True
            self.shared.copy_(x)

    def _arrived(self) -> None:
        """Wait for the average under way, if this rank has asked for one."""
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            try:
                meeting.wait()
            except RuntimeError as error:
                raise PeerError(str(error)) from error

    def settle(self, aside: Comm) -> None:
        """No odd rank asks any more, and so no even rank is moved: then all take what they share."""
        self._arrived()
        aside.all_reduce(torch.zeros(1))
        self._take()

    def consensus(self, aside: Comm) -> Tensor:
        self.settle(aside)
        return super().consensus(aside)

    def salvage(self) -> Tensor:
        with self._lock:
            return self.shared + self.moved

    def adopt_(self, model: Tensor) -> None:
        self._start_at(model)
        self.replica.flat.copy_(model)

    def notes(self) -> Notes:
        return {"rounds": self.met, "peers": [] if self._partner is None else [self._partner]}

    def state_dict(self) -> dict[str, Tensor]:
        return {"shared": self.shared}

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        super().load_state_dict(state, steps)
        self._start_at(self.shared)

    def _start_at(self, model: Tensor) -> None:
        """Others see this from now on."""
        with self._lock:
            self.shared.copy_(model)
            self.moved.zero_()
            self._still = True

    def close(self) -> None:
        if self._asker is not None:
            last = Message(self.shared, self.config.wire)
            last.write(self.shared, CLOSE)
            for peer in self._peers:
                self._asker.submit(partial(self._tell, peer, last))
            self._asker.close()
        for thread in self._answerers:
            thread.join()

    def abandon(self) -> None:
        if self._asker is not None:
            self._asker.end()

    def _tell(self, peer: int, message: Message) -> Tensor:
        self.comm.exchange({peer: message.packed}, {})
        return message.packed
