"""Adam whose second moment is learnt in a warm-up and then frozen, so that its momentum can be compressed.

Tang et al. 2021, arXiv:2102.02888 (1-bit Adam) [recalled]. Compressing gradients breaks Adam, whose update is
not linear in them; with v frozen it is linear in the momentum, and error feedback is exact again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.core.errors import StateError
from laconic.core.layout import Layout
from laconic.optim.adam_tensors import AdamTensors, check_adam, make_adam
from laconic.optim.inner import mean_of, split
from laconic.strategies.exchange import Exchange
from laconic.strategies.method import Method
from laconic.strategies.rule import BoundRule, OptimiserView, Rule, Site


@dataclass(frozen=True)
class FrozenAdam(Rule):
    """From step `warmup_steps` on, the momentum's mean comes by `exchange`, inside `optimizer.step()`."""

    warmup_steps: int
    exchange: Method

    meets_in_step: ClassVar[bool] = True

    @property
    def wants(self) -> str:
        return "torch.optim.Adam or AdamW"

    def check(self, optimiser: Optimizer, missing: Collection[str]) -> None:
        check_adam(optimiser)

    def make(self, parameters: list[Tensor], *, lr: float | None, weight_decay: float) -> Optimizer:
        return make_adam(parameters, lr, weight_decay)

    def bind(self, layout: Layout, view: OptimiserView, site: Site) -> BoundRule:
        return _Frozen(self, layout, view, site)


class _Frozen(BoundRule):
    def __init__(self, spec: FrozenAdam, layout: Layout, view: OptimiserView, site: Site) -> None:
        self._spec = spec
        self._adam = AdamTensors(layout, view)
        self._exchange = Exchange(spec.exchange, self._adam.layout, site.comm, view, site.seed, site.seconds)
        self._updates: dict[str, float] = {}  # Adam's steps until v was frozen, by tensor

    def step_(self, step: int) -> Iterable[str]:
        if step < self._spec.warmup_steps:
            return ()
        adam, layout = self._adam, self._adam.layout
        if not self._updates:
            self._updates = {name: float(adam.state(name)["step"]) for name in layout.names}
        momenta = []
        for name in layout.names:
            b1 = float(adam.settings(name)["betas"][0])
            momenta.append(torch.lerp(adam.gradient(name), adam.momentum(name), b1))
        mean = mean_of(momenta, self._exchange, step)
        for name, m in zip(layout.names, layout.segments.views(mean), strict=True):
            self._update_(name, m)
        return layout.names

    def _update_(self, name: str, m: Tensor) -> None:
        adam, settings, state = self._adam, self._adam.settings(name), self._adam.state(name)
        adam.keep(name, m)
        state["step"] += 1
        rate = float(settings["lr"]) / (1 - float(settings["betas"][0]) ** float(state["step"]))
        move = adam.direction(name, m, self._updates[name])
        adam.take(name, adam.weights(name).mul_(adam.shrink(name)).sub_(move, alpha=rate))

    def state_dict(self) -> dict[str, Tensor]:
        frozen = {f"frozen/{name}": torch.tensor(count) for name, count in self._updates.items()}
        return {**self._exchange.state_dict(), **frozen}

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        names = {f"frozen/{name}" for name in self._adam.layout.names}
        frozen, residuals = split(state, "frozen/")
        if frozen and {f"frozen/{name}" for name in frozen} != names:
            raise StateError("the saved state froze the variance of other tensors: it is of another model")
        self._exchange.check_state(residuals)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.check_state(state)
        frozen, residuals = split(state, "frozen/")
        self._exchange.load_state_dict(residuals, step=0)
        self._updates = {name: float(count) for name, count in frozen.items()}
