"""LSGD: leaders with the lowest loss pull all ranks towards them, in each machine and among all.

    at every step:
        x <- LocalOpt(x, g)
        x <- (1 - p2/g_comm) x + (p2/g_comm) L_glob      to the last copy of the global leader
        x <- (1 - p1/l_comm) x + (p1/l_comm) L_loc       to the last copy of the local leader
    every l_comm steps, after an all-gather of running mean losses:
        L_loc = x with the lowest loss in the machine;   x <- (1 - c1) x + c1 L_loc
    every g_comm steps, after that:
        L_glob = x with the lowest loss of all;          x <- (1 - c2) x + c2 L_glob

    paper   g_comm   l_comm        p2     p1           c2    c1          avg_size
    here    every    local_every   pull   local_pull   mix   local_mix   average

Teng et al. 2019, arXiv:1905.10395; order and constants as in the authors' code, in which a server counts as
with count='total'.
"""

from __future__ import annotations

import math
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
from laconic.strategies.leaders.lsgd.election import Losses, elect, poll
from laconic.strategies.leaders.lsgd.periods import EachPeriods, Periods, TotalPeriods
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Notes, Strategy, Update


@dataclass(frozen=True, repr=False)
class LSGD(Strategy):
    """Election of a leader per machine every `local_every` steps, and of a global one every `every` steps.

    The script records each step's loss with `optimizer.note_loss(loss)` or `optimizer.step(closure)`. The
    group's model is the mean of all ranks. If all ranks share one machine, or each has its own, there is only
    a global leader.

    Wire, per election: 24 bytes to each rank; a leader broadcasts n float32, 4 n bytes, to its machine, the
    global one to all. With 'total' each step adds a call to the store, and each election an all-reduce of 16
    bytes. Memory: n float32 for each leader's copy.

    Args:
        every: Steps between global elections, a multiple of `local_every`; default: 16.
        local_every: Steps between elections in a machine, 1 or more; default: 4.
        pull: Pull to the global leader over `every` steps, in [0, 1]; default: 0.1.
        local_pull: Pull to the local leader over `local_every` steps, in [0, 1]; default: 0.1.
        mix: Share of a new global leader in x, in [0, 1]; default: 0.1.
        local_mix: Share of a new local leader in x, in [0, 1]; default: 0.1.
        ranks_per_node: Consecutive ranks per machine; default: 0, torchrun's LOCAL_WORLD_SIZE.
        average: Number of last losses whose mean is a rank's score; default: 0, the same as `local_every`.
        count: "each" (default): an election follows when every rank has done `local_every` or `every` steps;
            "total": when the N ranks together have done N times as many. Fast ranks then do more steps, and
            wait at most for the slowest rank's current one; no two runs are equal, ranks may end after
            different numbers of steps, and a barrier or an all-reduce in the training loop would deadlock.

    Raises:
        SpecError: An argument is outside its range.
    """

    every: int = 16
    local_every: int = 4
    pull: float = 0.1
    local_pull: float = 0.1
    mix: float = 0.1
    local_mix: float = 0.1
    ranks_per_node: int = 0
    average: int = 0
    count: str = "each"

    name: ClassVar[str] = "lsgd"
    paper: ClassVar[str] = "Teng et al. 2019, arXiv:1905.10395"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "yunfei-teng/LSGD"
    examples: ClassVar[tuple[str, ...]] = (
        "lsgd(every=64, local_every=16, ranks_per_node=4)",
        "lsgd(every=64, local_every=16, ranks_per_node=4, count='total')",
    )

    def __post_init__(self) -> None:
        arguments.whole("lsgd: every", self.every, 1)
        arguments.whole("lsgd: local_every", self.local_every, 1)
        for name in ("pull", "local_pull", "mix", "local_mix"):
            arguments.number(f"lsgd: {name}", getattr(self, name), least=0, most=1)
        arguments.whole("lsgd: ranks_per_node", self.ranks_per_node)
        arguments.whole("lsgd: average", self.average)
        arguments.choice("lsgd: count", self.count, ("each", "total"))
        if self.every % self.local_every:
            raise SpecError(
                f"lsgd: every must be a multiple of local_every={self.local_every}, because the global leader"
                f" is elected together with local ones, got {self.every}; use"
                f" every={-(-self.every // self.local_every) * self.local_every}"
            )

    @property
    def period(self) -> int:
        return self.every

    @property
    def clocked(self) -> bool:
        return self.count == "total"

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        hint = "a leader needs followers: start more workers"
        arguments.whole(f"{self!r}: the number of ranks", size, 2, hint=hint)
        if self.ranks_per_node and size % self.ranks_per_node:
            raise SpecError(
                f"{self!r}: ranks_per_node={self.ranks_per_node} does not divide {size} ranks: set it to the"
                " number of ranks on a machine, or to 0 to take it from torchrun"
            )

    def check_left(self, size: int, optimizer: Optimizer) -> None:
        """Accept any remaining ranks: each keeps its machine."""

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundLSGD:
        return BoundLSGD(self, replica, comm, machines(comm, self.ranks_per_node))


@dataclass(frozen=True)
class Leader:
    """Leader of `ranks`, the ranks of `comm`. `copy` (n,): its x when elected."""

    comm: Comm
    ranks: list[int]
    copy: Tensor
    rank: Tensor  # int64 (), -1 before the first election

    @classmethod
    def start(cls, comm: Comm, ranks: list[int], x: Tensor) -> Leader:
        return cls(comm, ranks, x.clone(), torch.tensor(-1, dtype=torch.int64, device="cpu"))

    def follow_(self, x: Tensor, scores: list[float], share: float) -> None:
        rank = elect(scores, self.ranks)
        if rank is None:
            return
        self.rank.fill_(rank)
        root = self.ranks.index(rank)
        if self.comm.rank == root:
            self.copy.copy_(x)
        self.comm.broadcast(self.copy, root)
        x.lerp_(self.copy, share)  # exactly x on the leader


class BoundLSGD(BoundStrategy):
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
        self._global_every = config.every // length
        self.periods: Periods = (
            EachPeriods(length) if config.count == "each" else TotalPeriods(length, comm, replica.flat.device)
        )

    def step_(self, update: Update, loss: float | None) -> None:
        config, x = self.config, self.replica.flat
        leads = loss != math.inf  # inf: a rank without inputs
        if loss is not None and leads:
            self.losses.note(loss)
        update()
        x.lerp_(self.leader.copy, config.pull / config.every)
        if self.local_leader is not None:
            x.lerp_(self.local_leader.copy, config.local_pull / config.local_every)
        with self.comm.phase("periods"):
            meets = self.periods.step(self.steps + 1)
        if meets:
            self._meet(resting=not leads, leads=leads)

    def _meet(self, resting: bool, leads: bool = True) -> None:
        config, x = self.config, self.replica.flat
        with self.comm.phase("election"):
            scores = poll(self.comm, self.losses, x, resting, leads)
        if self.local_leader is not None:
            with self.comm.phase("local leader"):
                self.local_leader.follow_(x, scores, config.local_mix)
        if self.periods.met % self._global_every == 0:
            with self.comm.phase("leader"):
                self.leader.follow_(x, scores, config.mix)

    def drain(self, side_comm: Comm) -> None:
        """Join the other ranks' elections until all have finished."""
        while self.periods.rest():
            self._meet(resting=True)

    def consensus(self, side_comm: Comm) -> Tensor:
        self.drain(side_comm)
        return super().consensus(side_comm)

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
        state = {"losses/window": self.losses.window, "losses/counts": self.losses.counts}
        for key, leader in self._leaders().items():
            state |= {f"{key}/copy": leader.copy, f"{key}/rank": leader.rank}
        return state | self.periods.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        super().load_state_dict(state, steps)
        self.periods.load_state_dict(state, steps)
