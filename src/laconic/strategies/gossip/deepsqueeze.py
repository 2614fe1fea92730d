"""DeepSqueeze: neighbours exchange compressed models, and each keeps its compression error.

    x_i <- LocalOpt(x_i, g_i)
    v_i = x_i + e_i;  q_i = C(v_i);  e_i <- v_i - q_i;  send q_i to the neighbours
    x_i <- x_i + gamma (sum_j W_ij q_j - q_i)       over the neighbours j and i itself

Tang et al. 2019, arXiv:1907.07346; as in the code of Aketi et al. 2021. It compresses whole models: few bits
need a small gamma. The mean of the x_i is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.codecs.minmax import MinMax
from laconic.comm.metered import Metered
from laconic.core.spec import Status
from laconic.strategies.gossip.mixing.coded import BoundCodedGossip, CodedGossip
from laconic.strategies.gossip.topologies import Topology
from laconic.strategies.gossip.topologies.ring import Ring
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import Update


@dataclass(frozen=True, repr=False)
class DeepSqueeze(CodedGossip):
    """Gossip of compressed models on a fixed graph.

    Wire, per neighbour and step: the codec's message for the matrices, after 8 bytes of length if that
    varies, and the vectors in float32.

    Args:
        compressor: A codec or selector for the matrices; default: minmax(bits=8).
        topology: A fixed undirected graph; default: ring().
        gamma: Consensus step, in (0, 1]; default: 1. Few bits need a small one.

    Raises:
        SpecError: An argument is outside its range.
    """

    compressor: Any = field(default_factory=lambda: MinMax(bits=8))
    topology: Topology = field(default_factory=Ring)
    gamma: float = 1.0

    name: ClassVar[str] = "deepsqueeze"
    paper: ClassVar[str] = "Tang et al. 2019, arXiv:1907.07346"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "aparna-aketi/Low_Precision_DL"
    examples: ClassVar[tuple[str, ...]] = ("deepsqueeze()", "deepsqueeze(topk(density=0.1), gamma=0.05)")

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundDeepSqueeze:
        return BoundDeepSqueeze(self, replica, comm, seed)


class BoundDeepSqueeze(BoundCodedGossip):
    def __init__(self, config: DeepSqueeze, replica: Replica, comm: Metered, seed: int) -> None:
        super().__init__(config, replica, comm, seed)
        self.error = torch.zeros_like(replica.flat)

    def step_(self, update: Update, loss: float | None) -> None:
        x, gamma = self.replica.flat, self.config.gamma
        update()
        self.error.add_(x)
        wire = self.wires.encode(self.error, self.turn)
        came = self.swap(wire)
        self.add_message_(wire, self.error, -1.0)
        self.add_message_(wire, x, gamma * (self.shares.own - 1.0))
        for rank, each in came.items():
            self.add_message_(each, x, gamma * self.shares.into[rank])

    def adopt_(self, model: Tensor) -> None:
        super().adopt_(model)
        self.error.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        return {"error": self.error}
