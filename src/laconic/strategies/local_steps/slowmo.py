"""SlowMo: local steps or gossip, and periodically a step of slow momentum along the mean change.

    x_i <- base strategy's step                    at every step
    d = x - mean_j x_j                             every `every` steps; x: the model at which all were equal
    u <- beta u + d / gamma                        gamma: the optimiser's current learning rate
    x <- x - lr gamma u;  x_i <- x

Wang et al. 2019, arXiv:1910.00643, and fairscale's code. Each slow step zeroes SGD's own momentum and keeps
Adam's. beta=0, lr=1 is local SGD; beta>0, lr=1 with SGD is block momentum (BMUF); one rank with beta=0 is
Lookahead. `average=False` is the paper's "noaverage": own x and u on every rank, and d = x - x_i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.codecs.dense import Dense
from laconic.comm.comm import Comm
from laconic.comm.metered import Metered
from laconic.core import arguments
from laconic.core.errors import AttachError, NonFiniteError, SpecError
from laconic.core.spec import Status
from laconic.strategies.local_steps import Outer
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Notes, Strategy, Update

BASE = "base/"


@dataclass(frozen=True, repr=False)
class SlowMo(Strategy):
    """Slow momentum over another strategy, or over local steps.

    Wire: that of `base`; with `average` also an all-reduce of n float32, 4 n bytes, every `every` steps.
    Memory: 2 n float32. If the learning rate falls by orders of magnitude and rises again, as with warm
    restarts, gamma u rises too.

    Args:
        every: Steps between slow steps, 1 or more; default: 12. The paper uses 48 over gossip.
        beta: Slow momentum, in [0, 1); default: 0.5. The paper uses 0.4 to 0.8.
        lr: Slow learning rate, above 0; default: 1.
        base: The underlying strategy, such as sgp(); default: None, local steps.
        average: Whether ranks average at a slow step; default: True. False needs `base`.

    Raises:
        SpecError: An argument is outside its range, or `average=False` without `base`.
    """

    every: int = 12
    beta: float = 0.5
    lr: float = 1.0
    base: Strategy | None = None
    average: bool = True

    name: ClassVar[str] = "slowmo"
    paper: ClassVar[str] = "Wang et al. 2019, arXiv:1910.00643"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "facebookresearch/fairscale"
    examples: ClassVar[tuple[str, ...]] = ("slowmo()", "slowmo(every=48, base=sgp())")

    def __post_init__(self) -> None:
        arguments.whole("slowmo: every", self.every, 1)
        arguments.number("slowmo: beta", self.beta, least=0, below=1)
        arguments.number("slowmo: lr", self.lr, above=0)
        arguments.flag("slowmo: average", self.average)
        if self.base is not None:
            arguments.piece("slowmo: base", self.base, Strategy, "sgp(), or None for local steps")
        elif not self.average:
            raise SpecError(
                "slowmo: average=False leaves all communication to base, got base=None: use base=sgp() or"
                " average=True"
            )

    @property
    def period(self) -> int:
        return math.lcm(self.every, super().period)

    @property
    def meets(self) -> bool:
        return self.average

    def check(self, size: int, optimizer: Optimizer) -> None:
        super().check(size, optimizer)
        if any("lr" not in group for group in optimizer.param_groups):
            raise AttachError(
                f"{self!r} divides by the learning rate, but {type(optimizer).__name__} has none: use an"
                " optimiser with lr=, or diloco()"
            )
        if self.base is not None:
            self.base.check(size, optimizer)

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundSlowMo:
        return BoundSlowMo(self, replica, optimizer, comm, seed)


class BoundSlowMo(BoundStrategy):
    def __init__(
        self, config: SlowMo, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int
    ) -> None:
        super().__init__(replica, comm)
        self.config = config
        self.rounds = 0
        self.momentum = torch.zeros_like(replica.flat)
        self._optimizer = optimizer
        self._outer = Outer(replica, comm, Dense(), seed, self.seconds)
        self._base: BoundStrategy | None = None
        if config.base is not None:
            self._side_comm = comm.split(0)  # the base may have pending messages
            self._base = config.base.bind(replica, optimizer, comm, seed)
            self.seconds = self._base.seconds

    def step_(self, update: Update, loss: float | None) -> None:
        if self._base is None:
            update()
        else:
            self._base.step(update, loss)
        if (self.steps + 1) % self.config.every == 0:
            self._slow_step()
            self.rounds += 1

    def _slow_step(self) -> None:
        gradient = self._outer_gradient()
        for rate, part in self.replica.rates(self._optimizer):
            step, u = gradient[part], self.momentum[part]
            step.add_(u, alpha=self.config.beta * rate)  # defined at rate 0 too
            if rate:
                torch.div(step, rate, out=u)
            else:
                u.mul_(self.config.beta)
        model = self._outer.anchor.sub(gradient, alpha=self.config.lr)
        self._outer.restart_(model)
        if self._base is not None and self.config.average:
            self._base.adopt_(model)
            if self.config.clocked:  # no rank sends while another loads
                self._side_comm.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"))
        for state in self._optimizer.state.values():
            if isinstance(buffer := state.get("momentum_buffer"), Tensor):
                buffer.zero_()

    def _outer_gradient(self) -> Tensor:
        if not self.config.average:
            return self._outer.anchor - self.replica.flat
        if self._base is None:
            return self._outer.mean_outer_gradient()
        self._base.drain(self._side_comm)
        with self.comm.phase("slow momentum"):
            gradient = self._outer.anchor - self._base.consensus(self._side_comm)
        if not bool(gradient.isfinite().all()):
            raise NonFiniteError("the average of all ranks is not finite: the training has diverged")
        return gradient

    def drain(self, side_comm: Comm) -> None:
        if self._base is not None:
            self._base.drain(side_comm)

    def consensus(self, side_comm: Comm) -> Tensor:
        return super().consensus(side_comm) if self._base is None else self._base.consensus(side_comm)

    def salvage(self) -> Tensor:
        return super().salvage() if self._base is None else self._base.salvage()

    def agreed(self) -> dict[str, Tensor]:
        return {"momentum": self.momentum} if self.config.average else {}

    def adopt_(self, model: Tensor) -> None:
        self._outer.restart_(model)
        if self._base is not None:
            self._base.adopt_(model)

    def notes(self) -> Notes:
        return ({} if self._base is None else self._base.notes()) | {"rounds": self.rounds}

    def state_dict(self) -> dict[str, Tensor]:
        base = {} if self._base is None else self._base.state_dict()
        own = {"momentum": self.momentum} | self._outer.state_dict()
        return own | {BASE + key: value for key, value in base.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        self.rounds = steps // self.config.every
        self.momentum.copy_(state["momentum"])
        self._outer.load_state_dict(state, self.rounds)
        if self._base is not None:
            part = {key.removeprefix(BASE): value for key, value in state.items() if key.startswith(BASE)}
            self._base.load_state_dict(part, steps)
        self.steps = steps

    def close(self) -> None:
        if self._base is not None:
            self._base.close()

    def abandon(self) -> None:
        if self._base is not None:
            self._base.abandon()
