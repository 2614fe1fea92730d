"""DiLoCo: local steps, and an outer Nesterov SGD whose gradient is the mean way that ranks have come.

    x_i <- LocalOpt(x_i, g_i)              at every step
    d = mean_j (x - x_j)                   every `every` steps, x being where all were last alike
    v <- momentum v + d
    x <- x - lr (d + momentum v);  x_i <- x

Douillard et al. 2023, arXiv:2311.08105. Outer step and constants as in public implementations (torchft and
PrimeIntellect's OpenDiLoCo). The local optimiser keeps its state. lr=1, momentum=0 is `local_sgd`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.codecs.dense import Dense
from laconic.comm.metered import Metered
from laconic.core.arguments import number, whole
from laconic.core.spec import Status
from laconic.strategies.local_steps.outer import Outer, carrier
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Notes, Strategy, Update


@dataclass(frozen=True, repr=False)
class DiLoCo(Strategy):
    """An outer step of rate `lr` and Nesterov `momentum` every `every` steps.

    `update`: what carries the ways d, with error feedback where it needs that: a codec, selector, reducer or
    method. A rank sends what `update` sends for one gradient, every `every` steps: 4 n bytes if dense.
    Memory: 2 n float32, and that of `update`.
    """

    every: int = 100
    lr: float = 0.7
    momentum: float = 0.9
    update: Any = field(default_factory=Dense)

    name: ClassVar[str] = "diloco"
    paper: ClassVar[str] = "Douillard et al. 2023, arXiv:2311.08105"
    status: ClassVar[Status] = "verified"
    examples: ClassVar[tuple[str, ...]] = ("diloco(every=500, update=minmax(bits=8))",)

    def __post_init__(self) -> None:
        whole("diloco: every", self.every, 1)
        number("diloco: lr", self.lr, above=0)
        number("diloco: momentum", self.momentum, least=0, below=1)
        carrier(self.update)

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundDiLoCo:
        return BoundDiLoCo(self, replica, comm, seed)


class BoundDiLoCo(BoundStrategy):
    """DiLoCo at work on one rank. `velocity` v float32 (n,) is equal on all."""

    def __init__(self, config: DiLoCo, replica: Replica, comm: Metered, seed: int) -> None:
        super().__init__(replica, comm)
        self.config = config
        self.rounds = 0
        self.velocity = torch.zeros_like(replica.flat)
        self._outer = Outer(replica, comm, config.update, seed, self.seconds)

    def step_(self, update: Update, loss: float | None) -> None:
        update()
        if (self.steps + 1) % self.config.every == 0:
            way = self._outer.mean_way()
            self.velocity.mul_(self.config.momentum).add_(way)
            way.add_(self.velocity, alpha=self.config.momentum)
            self._outer.restart_(self._outer.anchor.sub(way, alpha=self.config.lr))
            self.rounds += 1

    def adopt_(self, model: Tensor) -> None:
        self._outer.restart_(model)

    def notes(self) -> Notes:
        return {"rounds": self.rounds}

    def state_dict(self) -> dict[str, Tensor]:
        return {"velocity": self.velocity} | self._outer.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        self.rounds = steps // self.config.every
        self.velocity.copy_(state["velocity"])
        self._outer.load_state_dict(state, self.rounds)
        self.steps = steps
