"""LSGD: every rank is pulled to the one of the least loss, in its own machine and among all.

    at every step:
        x <- LocalOpt(x, g)
        x <- (1 - p2/g_comm) x + (p2/g_comm) L_glob      to the last copy of the global leader
        x <- (1 - p1/l_comm) x + (p1/l_comm) L_loc       to the last copy of the local leader
    every l_comm steps, after an all-gather of running mean losses:
        L_loc = x of the least loss in the machine;      x <- (1 - c1) x + c1 L_loc
    every g_comm steps, after that:
        L_glob = x of the least loss of all;             x <- (1 - c2) x + c2 L_glob

    paper   g_comm   l_comm        p2     p1           c2    c1          avg_size
    here    every    local_every   pull   local_pull   mix   local_mix   average

Teng et al. 2019, arXiv:1905.10395; order and constants as in the authors' code. There a server counts the
steps of all, so that fast workers do more of them: that is count='total', and `periods` says how it differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.comm import Comm
from laconic.comm.mesh import machines
from laconic.comm.metered import Metered
from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import Status
from laconic.strategies.leaders.election import Losses, elect, poll
from laconic.strategies.leaders.periods import EachPeriods, Periods, TotalPeriods
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Notes, Strategy, Update


@dataclass(frozen=True, repr=False)
class LSGD(Strategy):
    """A leader in each machine every `local_every` steps, and one of all every `every` steps.

    `local`: how many ranks in a row are a machine; 0 asks torchrun. Where all ranks share one machine, or
    each has one to itself, there is a global leader only. `average`: by how many of its last losses a rank is
    judged; 0 takes as many as `local_every`. The script tells each step's loss, by
    `optimizer.note_loss(loss)` or `optimizer.step(closure)`. The group's model is the mean of all ranks.

    `count='each'`: a meeting comes when every rank has done that many steps. 'total': when all ranks together
    have done that many times their number, a fast one more of them than a slow one; each waits for no more
    than the step that the slowest is in. Which rank does which step then depends on the clock, and no two
    runs are alike, nor like one with 'each'. Ranks may end after different numbers of steps.

    Wire: at each meeting 24 bytes to each rank; a leader broadcasts n float32, 4 n bytes, to its machine, the
    global one to all. 'total' asks the store for a number at each step, and sums up 16 bytes at each meeting.
    Memory: n float32 for each leader's copy.
    """

    every: int = 16
    local_every: int = 4
    pull: float = 0.1
    local_pull: float = 0.1
    mix: float = 0.1
    local_mix: float = 0.1
    local: int = 0
    average: int = 0
    count: str = "each"

    name: ClassVar[str] = "lsgd"
    paper: ClassVar[str] = "Teng et al. 2019, arXiv:1905.10395"
    status: ClassVar[Status] = "verified"
    examples: ClassVar[tuple[str, ...]] = (
        "lsgd(every=64, local_every=16, local=4)",
        "lsgd(every=64, local_every=16, local=4, count='total')",
    )

    def __post_init__(self) -> None:
        arguments.whole("lsgd: every", self.every, 1)
        arguments.whole("lsgd: local_every", self.local_every, 1)
        for name in ("pull", "local_pull", "mix", "local_mix"):
            arguments.number(f"lsgd: {name}", getattr(self, name), least=0, most=1)
        arguments.whole("lsgd: local", self.local)
        arguments.whole("lsgd: average", self.average)
        arguments.choice("lsgd: count", self.count, ("each", "total"))
        if self.every % self.local_every:
            raise SpecError(
                f"lsgd: every must be a multiple of local_every={self.local_every}, as the global leader is"
                f" found where local ones are, got {self.every}; take"
                f" every={-(-self.every // self.local_every) * self.local_every}"
            )

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        way_out = "a leader needs followers: start more workers"
        arguments.whole(f"{self!r}: the number of ranks", size, 2, way_out=way_out)
        if self.local and size % self.local:
            raise SpecError(
                f"{self!r}: local={self.local} does not divide {size} ranks: set local= to the number of"
                " ranks a machine, or to 0 to take it from torchrun"
            )

    def check_left(self, size: int, optimizer: Optimizer) -> None:
        """Any two ranks will do: machines are those of the beginning."""

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundLSGD:
        return BoundLSGD(self, replica, comm, machines(comm, self.local))


@dataclass(frozen=True)
class Leader:
    """The leader of these ranks, who are those of `comm`. `copy` (n,): its x when it was elected."""

    comm: Comm
    ranks: list[int]
    copy: Tensor
    rank: Tensor  # int64 (): who it is, -1 before the first election

    @classmethod
    def start(cls, comm: Comm, ranks: list[int], x: Tensor) -> Leader:
        """Nobody yet: the copy is where all begin."""
        return cls(comm, ranks, x.clone(), torch.tensor(-1))

    def follow_(self, x: Tensor, scores: list[float], share: float) -> None:
        """Elect, take a new copy and mix it into x; nothing where nobody can lead. Called by all ranks."""
        rank = elect(scores, self.ranks)
        if rank is None:
            return
        self.rank.fill_(rank)
        root = self.ranks.index(rank)
        if self.comm.rank == root:
            self.copy.copy_(x)
        self.comm.broadcast(self.copy, root)
        x.lerp_(self.copy, share)  # x + share (copy - x): of the leader itself exactly x


class BoundLSGD(BoundStrategy):
    """LSGD at work on one rank. `homes`: each rank's machine."""

    def __init__(self, config: LSGD, replica: Replica, comm: Metered, homes: list[int]) -> None:
        super().__init__(replica, comm)
        self.config = config
        self.losses = Losses(config.average or config.local_every)
        own = homes[comm.rank]
        self.leader = Leader.start(comm, list(range(comm.size)), replica.flat)
        self.local_leader: Leader | None = None
        if 1 < len(set(homes)) < comm.size:
            mates = [rank for rank, home in enumerate(homes) if home == own]
            self.local_leader = Leader.start(comm.split(own), mates, replica.flat)
        length = config.every if self.local_leader is None else config.local_every
        self._global_every = config.every // length  # meetings
        self.periods: Periods = (
            EachPeriods(length) if config.count == "each" else TotalPeriods(length, comm, replica.flat.device)
        )

    def step_(self, update: Update, loss: float | None) -> None:
        config, x = self.config, self.replica.flat
        if loss is not None:
            self.losses.note(loss)
        update()
        x.lerp_(self.leader.copy, config.pull / config.every)
        if self.local_leader is not None:
            x.lerp_(self.local_leader.copy, config.local_pull / config.local_every)
        with self.comm.phase("periods"):
            meets = self.periods.step(self.steps + 1)
        if meets:
            self._meet()

    def _meet(self, resting: bool = False) -> None:
        config, x = self.config, self.replica.flat
        with self.comm.phase("election"):
            scores = poll(self.comm, self.losses, x, resting)
        if self.local_leader is not None:
            with self.comm.phase("local leader"):
                self.local_leader.follow_(x, scores, config.local_mix)
        if self.periods.met % self._global_every == 0:
            with self.comm.phase("leader"):
                self.leader.follow_(x, scores, config.mix)

    def settle(self, aside: Comm) -> None:
        """Others may still step, and meet: until they are done too, this rank is at their meetings."""
        while self.periods.rest():
            self._meet(resting=True)

    def consensus(self, aside: Comm) -> Tensor:
        self.settle(aside)
        return super().consensus(aside)

    def adopt_(self, model: Tensor) -> None:
        super().adopt_(model)
        for leader in self._leaders().values():
            leader.copy.copy_(model)

    def _leaders(self) -> dict[str, Leader]:
        local = {} if self.local_leader is None else {"local_leader": self.local_leader}
        return {"leader": self.leader} | local

    def notes(self) -> Notes:
        leaders = {key: int(leader.rank) for key, leader in self._leaders().items()}
        return {"rounds": self.periods.met, "loss": self.losses.mean()} | leaders

    def state_dict(self) -> dict[str, Tensor]:
        state = {"losses/window": self.losses.window, "losses/told": self.losses.told}
        for key, leader in self._leaders().items():
            state |= {f"{key}/copy": leader.copy, f"{key}/rank": leader.rank}
        return state | self.periods.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        super().load_state_dict(state, steps)
        self.periods.load_state_dict(state, steps)
