"""Low-precision decentralised training: 8-bit differences among neighbours, with quasi-global momentum.

    x_i <- SGD's step with quasi-global momentum       see quasi_global
    gossip of C(x_i - h_i), C of 8 bits                see choco

Aketi et al. 2021, arXiv:2111.09389, and their code. Their models also compute in 8 bits:
`laconic.lowbit.convert(model, bits=8)`, or `laconic train --bits 8`. The min-max grid on the wire is ours, in
place of QSGD's levels or large entries. Their alternative is `quasi_global(deepsqueeze())`.
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
from laconic.strategies.gossip.mixing.coded import CodedGossip
from laconic.strategies.gossip.quasi_global import QuasiGlobal, check_plain
from laconic.strategies.gossip.topologies import Topology
from laconic.strategies.gossip.topologies.ring import Ring
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy


@dataclass(frozen=True, repr=False)
class LPDT(CodedGossip):
    """Gossip of compressed differences on a fixed graph, with quasi-global momentum.

    Wire, per neighbour and step: n bytes and 8 for each 512 of the matrices, and the vectors in float32: 3.9
    times less than `dpsgd`.

    Args:
        compressor: A codec or selector for the matrices; default: minmax(bits=8).
        topology: A fixed undirected graph; default: ring().
        gamma: Consensus step, in (0, 1]; default: 1. Few bits need a small one: the paper uses 0.01 for top-k
            of 1 %.
        momentum: Quasi-global momentum, in [0, 1), over an SGD without momentum; default: 0.9. With 0 any
            optimiser works.

    Raises:
        SpecError: An argument is outside its range.
    """

    compressor: Any = field(default_factory=lambda: MinMax(bits=8))
    topology: Topology = field(default_factory=Ring)
    gamma: float = 1.0
    momentum: float = 0.9

    name: ClassVar[str] = "lpdt"
    paper: ClassVar[str] = "Aketi et al. 2021, arXiv:2111.09389"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "aparna-aketi/Low_Precision_DL"
    examples: ClassVar[tuple[str, ...]] = ("lpdt()", "lpdt(topology=torus())")

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
        gossip = CHOCO(self.compressor, self.topology, self.gamma)
        return QuasiGlobal(gossip, self.momentum).bind(replica, optimizer, comm, seed)
