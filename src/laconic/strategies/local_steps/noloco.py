"""NoLoCo: local steps, and outer steps with one random peer whose momentum pulls the two together.

    x_i <- LocalOpt(x_i, g_i)                          at every step
    s_i = lr (x_i - y_i) + pull y_i                    every `every` steps; y_i: own slow model
    v_i <- momentum v_i + (s_i + s_j) / 2 - pull y_i   j: the peer of this outer step
    y_i <- y_i + v_i;  x_i <- y_i

Kolehmainen et al. 2025, arXiv:2506.10911. Reconstruction of its outer step for groups of two. Random routing
between pipeline stages is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.metered import Metered
from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.core.spec import Status
from laconic.strategies.gossip.mixing import Weights, metropolis
from laconic.strategies.gossip.topologies import Topology
from laconic.strategies.gossip.topologies.random_matching import RandomMatching
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Notes, Strategy, Update


@dataclass(frozen=True, repr=False)
class NoLoCo(Strategy):
    """Outer step with one random peer, every `every` steps: no rank waits for all.

    Wire, every `every` steps: n float32 to the peer, 4 n bytes. Memory: 2 n float32. Models of ranks differ.
    With an odd number of ranks, one rank per round does its outer step alone.

    Args:
        every: Steps between outer steps, 1 or more; default: 50.
        lr: Outer learning rate, above 0; default: 0.7.
        momentum: Outer momentum, in [0, 1); default: 0.5.
        pull: Share of the distance to the pair's mean slow model that a step removes, in (`momentum`, 2), or
            ranks diverge; default: 1.
        topology: The pairs, or another symmetric graph; default: random_matching().

    Raises:
        SpecError: An argument is outside its range, or an edge goes one way only.
    """

    every: int = 50
    lr: float = 0.7
    momentum: float = 0.5
    pull: float = 1.0
    topology: Topology = field(default_factory=RandomMatching)

    name: ClassVar[str] = "noloco"
    paper: ClassVar[str] = "Kolehmainen et al. 2025, arXiv:2506.10911"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = ("noloco()", "noloco(every=4, lr=1.0, topology=ring())")

    def __post_init__(self) -> None:
        arguments.whole("noloco: every", self.every, 1)
        arguments.number("noloco: lr", self.lr, above=0)
        arguments.number("noloco: momentum", self.momentum, least=0, below=1)
        arguments.number("noloco: pull", self.pull, above=self.momentum, below=2, hint="or ranks diverge")
        arguments.piece("noloco: topology", self.topology, Topology, "random_matching()")
        if not self.topology.symmetric:
            raise SpecError(
                f"noloco averages both ways, but not all edges of {self.topology!r} go both ways: use"
                " random_matching(), ring(), torus() or bipartite_exponential()"
            )

    @property
    def period(self) -> int:
        return self.every

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        self.topology.check(size)

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundNoLoCo:
        return BoundNoLoCo(self, replica, comm)


class BoundNoLoCo(BoundStrategy):
    def __init__(self, config: NoLoCo, replica: Replica, comm: Metered) -> None:
        super().__init__(replica, comm)
        self.config = config
        self.slow = replica.flat.clone()
        self.velocity = torch.zeros_like(replica.flat)

    @property
    def rounds(self) -> int:
        return self.steps // self.config.every

    def shares(self, number: int) -> Weights:
        return metropolis(self.config.topology, self.comm.rank, self.comm.size, number)

    def step_(self, update: Update, loss: float | None) -> None:
        update()
        if (self.steps + 1) % self.config.every == 0:
            self._outer_step(self.shares(self.rounds))

    def _outer_step(self, shares: Weights) -> None:
        config = self.config
        going = (self.replica.flat - self.slow).mul_(config.lr).add_(self.slow, alpha=config.pull)
        came = {peer: torch.empty_like(going) for peer in shares.into}
        with self.comm.phase("gossip"):
            self.comm.exchange(dict.fromkeys(shares.out, going), came)
        self.replica.rest_(self.velocity)
        self.velocity.mul_(config.momentum).sub_(self.slow, alpha=config.pull)
        self.velocity.add_(going, alpha=shares.own)
        for peer, message in came.items():
            self.velocity.add_(message, alpha=shares.into[peer])
        self.slow.add_(self.velocity)
        self.replica.flat.copy_(self.slow)

    def adopt_(self, model: Tensor) -> None:
        self.slow.copy_(model)
        self.replica.flat.copy_(model)

    def notes(self) -> Notes:
        peers = sorted(self.shares(self.rounds - 1).out) if self.rounds else []
        return {"rounds": self.rounds, "peers": peers}

    def state_dict(self) -> dict[str, Tensor]:
        return {"slow": self.slow, "velocity": self.velocity}
