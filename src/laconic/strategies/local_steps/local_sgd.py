"""Local SGD: every rank trains alone, and all average their parameters periodically.

    x_i <- LocalOpt(x_i, g_i)                       at every step
    x_i <- x - mean_j (x - x_j)                     every `every` steps; x: the last average

Stich 2018, arXiv:1805.09767. With `start` and SGD the first steps equal training on mean gradients:
post-local SGD, Lin et al. 2018, arXiv:1808.07217. Both as recalled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from laconic.codecs.dense import Dense
from laconic.comm.metered import Metered
from laconic.core.arguments import whole
from laconic.core.spec import Status
from laconic.strategies.local_steps import Outer, outer_method
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Notes, Strategy, Update


@dataclass(frozen=True, repr=False)
class LocalSGD(Strategy):
    """Average of parameters every `every` steps, and after each of the first `start` steps.

    Wire, at each average: that of `compressor` for one gradient.

    Args:
        every: Steps between averages, 1 or more; default: 8.
        start: Number of first steps after each of which ranks average; default: 0.
        compressor: Sends the changes since the last average: a codec, selector, reducer or method, with error
            feedback if biased; default: dense().

    Raises:
        SpecError: An argument is outside its range, or `compressor` changes the optimiser.
    """

    every: int = 8
    start: int = 0
    compressor: Any = field(default_factory=Dense)

    name: ClassVar[str] = "local_sgd"
    paper: ClassVar[str] = "Stich 2018, arXiv:1805.09767"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = ("local_sgd()", "local_sgd(every=4, compressor=minmax(bits=8))")

    def __post_init__(self) -> None:
        whole("every", self.every, 1)
        whole("start", self.start)
        outer_method(self.compressor)

    @property
    def period(self) -> int:
        return self.every

    @property
    def meets(self) -> bool:
        return True

    @property
    def keeps_mean(self) -> bool:
        return isinstance(self.compressor, Dense)

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundLocalSGD:
        return BoundLocalSGD(self, replica, comm, seed)


class BoundLocalSGD(BoundStrategy):
    def __init__(self, config: LocalSGD, replica: Replica, comm: Metered, seed: int) -> None:
        super().__init__(replica, comm)
        self.config = config
        self.rounds = 0
        self._outer = Outer(replica, comm, config.compressor, seed, self.seconds)

    def step_(self, update: Update, loss: float | None) -> None:
        update()
        done = self.steps + 1
        if done <= self.config.start or done % self.config.every == 0:
            self._outer.restart_(self._outer.anchor - self._outer.mean_outer_gradient())
            self.rounds += 1

    def adopt_(self, model: Tensor) -> None:
        self._outer.restart_(model)

    def notes(self) -> Notes:
        return {"rounds": self.rounds}

    def state_dict(self) -> dict[str, Tensor]:
        return self._outer.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        early = min(steps, self.config.start)
        every = self.config.every
        self.rounds = early + steps // every - early // every
        self._outer.load_state_dict(state, self.rounds)
        self.steps = steps
