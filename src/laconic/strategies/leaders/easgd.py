"""EASGD: an elastic force pulls every rank to one centre, and the centre to all ranks.

    x_i <- LocalOpt(x_i, g_i)                  at every step
    x_i <- x_i - alpha (x_i - c)               every `every` steps, alpha = beta / ranks; both right sides
    c <- c + beta mean_j (x_j - c)             have the values from before

Zhang, Choromanska and LeCun 2015, arXiv:1412.6651; synchronous, like the baseline in the code of LSGD; the
paper's asynchronous form and its momentum (EAMSGD) are left out. The sum of all x_i and c is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.comm import Comm
from laconic.comm.metered import Metered
from laconic.core import arguments
from laconic.core.errors import NonFiniteError
from laconic.core.spec import Status
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Notes, Strategy, Update


@dataclass(frozen=True, repr=False)
class EASGD(Strategy):
    """Elastic averaging; the centre is the group's model.

    Wire, every `every` steps: an all-reduce of n float32, 4 n bytes. Memory: the centre, n float32.

    Args:
        every: Steps between pulls, 1 or more; default: 4.
        beta: Pull on the centre, in (0, 1]; default: 0.43. A rank's share is beta / ranks.

    Raises:
        SpecError: An argument is outside its range.
    """

    every: int = 4
    beta: float = 0.43

    name: ClassVar[str] = "easgd"
    paper: ClassVar[str] = "Zhang et al. 2015, arXiv:1412.6651"
    status: ClassVar[Status] = "partial"
    code: ClassVar[str] = "yunfei-teng/LSGD"
    examples: ClassVar[tuple[str, ...]] = ("easgd()", "easgd(every=16)")

    def __post_init__(self) -> None:
        arguments.whole("easgd: every", self.every, 1)
        arguments.number("easgd: beta", self.beta, above=0, most=1)

    @property
    def period(self) -> int:
        return self.every

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        hint = "one rank cannot average with another: start more workers"
        arguments.whole(f"{self!r}: the number of ranks", size, 2, hint=hint)

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundEASGD:
        return BoundEASGD(self, replica, comm)


class BoundEASGD(BoundStrategy):
    def __init__(self, config: EASGD, replica: Replica, comm: Metered) -> None:
        super().__init__(replica, comm)
        self.config = config
        self.centre = replica.flat.clone()

    def step_(self, update: Update, loss: float | None) -> None:
        update()
        if (self.steps + 1) % self.config.every == 0:
            self._meet()

    def _meet(self) -> None:
        size, beta = self.comm.size, self.config.beta
        offset = self.replica.flat - self.centre
        own = offset.clone()
        with self.comm.phase("centre"):
            mean = self.comm.all_reduce(offset).div_(size)
        if not bool(mean.isfinite().all()):
            raise NonFiniteError("the mean of all ranks is not finite: training has diverged")
        self.replica.flat.sub_(own, alpha=beta / size)
        self.centre.add_(mean, alpha=beta)

    def consensus(self, side_comm: Comm) -> Tensor:
        return self.centre.clone()

    def agreed(self) -> dict[str, Tensor]:
        return {"centre": self.centre}

    def adopt_(self, model: Tensor) -> None:
        super().adopt_(model)
        self.centre.copy_(model)

    def notes(self) -> Notes:
        return {"rounds": self.steps // self.config.every}

    def state_dict(self) -> dict[str, Tensor]:
        return {"centre": self.centre}
