"""DiLoCo: local steps, and an outer Nesterov SGD whose gradient is the ranks' mean movement.

    x_i <- LocalOpt(x_i, g_i)              at every step
    d = mean_j (x - x_j)                   every `every` steps; x: the model at which all were last equal
    v <- momentum v + d
    x <- x - lr (d + momentum v);  x_i <- x

Douillard et al. 2023, arXiv:2311.08105. Outer step and constants as in public implementations (torchft and
PrimeIntellect's OpenDiLoCo). The local optimiser keeps its state. With lr=1, momentum=0 it is `local_sgd`.
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
from laconic.strategies.local_steps import Outer, outer_method
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Notes, Strategy, Update


@dataclass(frozen=True, repr=False)
class DiLoCo(Strategy):
    """Nesterov SGD on the outer gradient d, every `every` steps.

    Wire, every `every` steps: what `compressor` sends for one gradient, 4 n bytes if dense. Memory: 2 n
    float32, and that of `compressor`.

    Args:
        every: Steps from one outer step to the next, 1 or more; default: 100.
        lr: Outer learning rate, above 0; default: 0.7.
        momentum: Outer Nesterov momentum, in [0, 1); default: 0.9.
        compressor: Sends d: a codec, selector, reducer or method, with error feedback if it is biased;
            default: dense().

    Raises:
        SpecError: An argument is outside its range, or `compressor` changes the optimiser.
    """

    every: int = 100
    lr: float = 0.7
    momentum: float = 0.9
    compressor: Any = field(default_factory=Dense)

    name: ClassVar[str] = "diloco"
    paper: ClassVar[str] = "Douillard et al. 2023, arXiv:2311.08105"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "meta-pytorch/torchft"
    examples: ClassVar[tuple[str, ...]] = ("diloco()", "diloco(every=500, compressor=minmax(bits=8))")

    def __post_init__(self) -> None:
        whole("diloco: every", self.every, 1)
        number("diloco: lr", self.lr, above=0)
        number("diloco: momentum", self.momentum, least=0, below=1)
        outer_method(self.compressor)

    @property
    def period(self) -> int:
        return self.every

    @property
    def meets(self) -> bool:
        return True

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundDiLoCo:
        return BoundDiLoCo(self, replica, comm, seed)


class BoundDiLoCo(BoundStrategy):
    """DiLoCo at work on one rank. `velocity` v float32 (n,) is equal on all ranks."""

    def __init__(self, config: DiLoCo, replica: Replica, comm: Metered, seed: int) -> None:
        super().__init__(replica, comm)
        self.config = config
        self.rounds = 0
        self.velocity = torch.zeros_like(replica.flat)
        self._outer = Outer(replica, comm, config.compressor, seed, self.seconds)

    def step_(self, update: Update, loss: float | None) -> None:
        update()
        if (self.steps + 1) % self.config.every == 0:
            gradient = self._outer.mean_outer_gradient()
            self.velocity.mul_(self.config.momentum).add_(gradient)
            gradient.add_(self.velocity, alpha=self.config.momentum)
            self._outer.restart_(self._outer.anchor.sub(gradient, alpha=self.config.lr))
            self.rounds += 1

    def agreed(self) -> dict[str, Tensor]:
        return {"velocity": self.velocity}

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
