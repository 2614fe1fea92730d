"""CHOCO-SGD: neighbours exchange compressed differences to copies of each other's models.

    x_i <- LocalOpt(x_i, g_i)
    x_i <- x_i + gamma (s_i - h_i)                  consensus, with the copies of the last step
    q_i = C(x_i - h_i);  send q_i to the neighbours
    h_i <- h_i + q_i;  s_i <- s_i + sum_j W_ij q_j  over the neighbours j and i itself

Koloskova et al. 2019, arXiv:1902.00340 and arXiv:1907.09356; in the order of the authors' code, but without
its overlap with the next gradient. h_i is the neighbours' copy of x_i, s_i = sum_j W_ij h_j. The mean of the
x_i is kept. Among 8 ranks on a ring, top-k of density 0.1 converges at gamma 0.3 and diverges at 1; density
0.01 converges at 0.04 and diverges at 0.3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.codecs.selectors.topk import TopK
from laconic.comm.metered import Metered
from laconic.core.spec import Status
from laconic.strategies.gossip.mixing.coded import BoundCodedGossip, CodedGossip
from laconic.strategies.gossip.topologies import Topology
from laconic.strategies.gossip.topologies.ring import Ring
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import Update


@dataclass(frozen=True, repr=False)
class CHOCO(CodedGossip):
    """Gossip of compressed differences on a fixed graph.

    Wire, per neighbour and step: the codec's message for the matrices, after 8 bytes of length if that
    varies, and the vectors in float32.

    Args:
        compressor: A codec or selector for the matrices; default: topk(density=0.1).
        topology: A fixed undirected graph; default: ring().
        gamma: Consensus step, in (0, 1]; default: 0.3. Few bits need a small one.

    Raises:
        SpecError: An argument is outside its range.
    """

    compressor: Any = field(default_factory=lambda: TopK(density=0.1))
    topology: Topology = field(default_factory=Ring)
    gamma: float = 0.3

    name: ClassVar[str] = "choco"
    paper: ClassVar[str] = "Koloskova et al. 2019, arXiv:1902.00340"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "epfml/ChocoSGD"
    examples: ClassVar[tuple[str, ...]] = ("choco()", "choco(sign(), gamma=0.45)")

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundCHOCO:
        return BoundCHOCO(self, replica, comm, seed)


class BoundCHOCO(BoundCodedGossip):
    """CHOCO-SGD on one rank: `copy` is h and `around` is s, float32 (n,)."""

    def __init__(self, config: CHOCO, replica: Replica, comm: Metered, seed: int) -> None:
        super().__init__(config, replica, comm, seed)
        self.copy = torch.zeros_like(replica.flat)
        self.around = torch.zeros_like(replica.flat)

    def step_(self, update: Update, loss: float | None) -> None:
        x, gamma = self.replica.flat, self.config.gamma
        update()
        x.add_(self.around, alpha=gamma).sub_(self.copy, alpha=gamma)
        wire = self.wires.encode(x - self.copy, self.turn)
        came = self.swap(wire)
        self.add_message_(wire, self.copy, 1.0)
        self.add_message_(wire, self.around, self.shares.own)
        for rank, each in came.items():
            self.add_message_(each, self.around, self.shares.into[rank])

    def adopt_(self, model: Tensor) -> None:
        super().adopt_(model)
        self.copy.copy_(model)
        self.around.copy_(model)

    def state_dict(self) -> dict[str, Tensor]:
        return {"copy": self.copy, "around": self.around}
