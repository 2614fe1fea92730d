"""Quasi-global momentum: momentum of a rank's total movement, including gossip.

    u = (x - SGD's step from x) / lr               the gradient, with weight decay
    x' = x - lr (u + mu (mu m + u))                nesterov; else x - lr (u + mu m)
    x'' = base strategy's gossip from x'
    m <- mu m + (1 - mu) (x - x'') / lr            lr: the optimiser's current learning rate

Lin et al. 2021, arXiv:2102.04761 [recalled], as in the code of Aketi et al. 2021, arXiv:2111.09389. On skewed
shards m drives models apart less than gradients do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from laconic.comm.comm import Comm
from laconic.comm.metered import Metered
from laconic.core import arguments
from laconic.core.errors import AttachError, SpecError
from laconic.core.spec import Status
from laconic.strategies.gossip.adpsgd import ADPSGD
from laconic.strategies.gossip.dpsgd import DPSGD
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Notes, Strategy, Update

BASE = "base/"


@dataclass(frozen=True, repr=False)
class QuasiGlobal(Strategy):
    """Momentum over a gossip strategy; it replaces the momentum of the optimiser, a plain SGD.

    Wire: that of `base`. Memory: m, n float32, and 2 n inside a step. A step that a GradScaler skips has u =
    0; at learning rate 0, m only decays.

    Args:
        base: The gossip; default: dpsgd().
        momentum: mu, in [0, 1); default: 0.9. With 0 this is `base` alone, with any optimiser.
        nesterov: Whether the step is Nesterov's; default: True.

    Raises:
        SpecError: An argument is outside its range, or `base` is or contains adpsgd().
    """

    base: Strategy = field(default_factory=DPSGD)
    momentum: float = 0.9
    nesterov: bool = True

    name: ClassVar[str] = "quasi_global"
    paper: ClassVar[str] = "Lin et al. 2021, arXiv:2102.04761"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "aparna-aketi/Low_Precision_DL"
    examples: ClassVar[tuple[str, ...]] = ("quasi_global()", "quasi_global(deepsqueeze())")

    def __post_init__(self) -> None:
        arguments.piece(f"{self.name}: base", self.base, Strategy, "dpsgd()")
        arguments.number(f"{self.name}: momentum", self.momentum, least=0, below=1)
        arguments.flag(f"{self.name}: nesterov", self.nesterov)
        if _has_adpsgd(self.base):
            raise SpecError(
                "quasi_global measures the movement of each step, but adpsgd also moves the model between"
                f" steps, got base={self.base!r}: use base=dpsgd() or sgp()"
            )

    @property
    def owns_momentum(self) -> bool:
        return self.momentum > 0

    @property
    def keeps_mean(self) -> bool:
        return self.base.keeps_mean

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        if self.owns_momentum:
            check_plain(self, optimizer)
        self.base.check(size, optimizer)

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundStrategy:
        if not self.owns_momentum:
            return self.base.bind(replica, optimizer, comm, seed)
        return BoundQuasiGlobal(self, replica, optimizer, comm, seed)


class BoundQuasiGlobal(BoundStrategy):
    def __init__(
        self, config: QuasiGlobal, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int
    ) -> None:
        super().__init__(replica, comm)
        self.config = config
        self.momentum = torch.zeros_like(replica.flat)
        self._optimizer = optimizer
        self._base = config.base.bind(replica, optimizer, comm, seed)
        self.seconds = self._base.seconds

    def step_(self, update: Update, loss: float | None) -> None:
        before, mu = self.replica.flat.clone(), self.config.momentum
        self._base.step(lambda: self._update_(update), loss)
        moved = before.sub_(self.replica.flat)
        self.momentum.mul_(mu)
        for rate, part in self.replica.rates(self._optimizer):
            if rate:
                self.momentum[part].add_(moved[part], alpha=(1 - mu) / rate)

    def _update_(self, update: Update) -> None:
        x, mu = self.replica.flat, self.config.momentum
        before = x.clone()
        update()
        step = before.sub_(x)
        if self.config.nesterov:
            x.sub_(step, alpha=mu)
        further = mu * mu if self.config.nesterov else mu
        for rate, part in self.replica.rates(self._optimizer):
            x[part].sub_(self.momentum[part], alpha=further * rate)

    def drain(self, side_comm: Comm) -> None:
        self._base.drain(side_comm)

    def consensus(self, side_comm: Comm) -> Tensor:
        return self._base.consensus(side_comm)

    def salvage(self) -> Tensor:
        return self._base.salvage()

    def adopt_(self, model: Tensor) -> None:
        self._base.adopt_(model)

    def notes(self) -> Notes:
        return self._base.notes()

    def state_dict(self) -> dict[str, Tensor]:
        base = {BASE + key: value for key, value in self._base.state_dict().items()}
        return {"momentum": self.momentum} | base

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        self.momentum.copy_(state["momentum"])
        part = {key.removeprefix(BASE): value for key, value in state.items() if key.startswith(BASE)}
        self._base.load_state_dict(part, steps)
        self.steps = steps

    def close(self) -> None:
        self._base.close()

    def abandon(self) -> None:
        self._base.abandon()


def _has_adpsgd(strategy: Strategy) -> bool:
    return isinstance(strategy, ADPSGD) or any(map(_has_adpsgd, strategy.parts))


def check_plain(strategy: Strategy, optimizer: Optimizer) -> None:
    own = max((float(group.get("momentum", 0)) for group in optimizer.param_groups), default=0.0)
    if not isinstance(optimizer, SGD) or own:
        got = f"SGD(momentum={own:g})" if isinstance(optimizer, SGD) else type(optimizer).__name__
        raise AttachError(
            f"{strategy!r} has its own momentum and needs a plain torch.optim.SGD, got {got}: create"
            " SGD(parameters, lr=...), or set momentum=0 in the spec, which leaves it to the optimiser"
        )
