"""Low-precision decentralised training: 8-bit differences among neighbours, under quasi-global momentum.

    x_i <- SGD's step with quasi-global momentum       see quasi_global
    gossip of C(x_i - h_i), C of 8 bits                see choco

Aketi et al. 2021, arXiv:2111.09389, and their code. Their models compute in 8 bits too: convert yours by
`laconic.lowbit.convert(model, bits=8)`, or give `laconic train` the option --bits 8. What is sent here is on
a min-max grid, which is ours; their code sends levels of QSGD or large entries. DeepSqueeze in CHOCO's place,
their other choice, is `quasi_global(deepsqueeze())`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch.optim import Optimizer

from laconic.codecs.minmax import MinMax
from laconic.comm.metered import Metered
from laconic.core import arguments
from laconic.core.spec import Status
from laconic.strategies.gossip.choco import CHOCO
from laconic.strategies.gossip.coded import CodedGossip
from laconic.strategies.gossip.quasi_global import QuasiGlobal, check_plain
from laconic.strategies.gossip.topologies.ring import Ring
from laconic.strategies.gossip.topology import Topology
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy


@dataclass(frozen=True, repr=False)
class LPDT(CodedGossip):
    """Gossip in `message` on a fixed `topology` by steps `gamma`, with quasi-global momentum `momentum`.

    The optimiser is SGD without momentum; with `momentum=0` it is any, with its own. Wire, to each neighbour
    a step: n bytes and 8 for each 512 of the matrices, and the vectors in float32: 3.9 times less than
    `dpsgd`. Few bits need a small gamma: top-k of 1 % takes 0.01 in their runs.
    """

    message: Any = field(default_factory=lambda: MinMax(bits=8))
    topology: Topology = field(default_factory=Ring)
    gamma: float = 1.0
    momentum: float = 0.9

    name: ClassVar[str] = "lpdt"
    paper: ClassVar[str] = "Aketi et al. 2021, arXiv:2111.09389"
    status: ClassVar[Status] = "verified"
    examples: ClassVar[tuple[str, ...]] = ("lpdt(topology=torus())",)

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.number("lpdt: momentum", self.momentum, least=0, below=1)

    @property
    def owns_momentum(self) -> bool:
        return self.momentum > 0

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        if self.owns_momentum:
            check_plain(self, optimizer)

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundStrategy:
        gossip = CHOCO(self.message, self.topology, self.gamma)
        return QuasiGlobal(gossip, self.momentum).bind(replica, optimizer, comm, seed)
