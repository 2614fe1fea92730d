"""A rule that asks for a kind of optimiser, and leaves the update to it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.strategies.rule import BoundRule, OnlyAsks, OptimiserView, Rule, Site


@dataclass(frozen=True)
class Asks(Rule):
    """`kind`: the optimiser in words; `fits`: whether one will do; `build(parameters, lr, weight_decay)`: a
    usual one, with `lr` None where the usual rate is meant.
    """

    kind: str
    fits: Callable[[Optimizer], bool]
    build: Callable[[list[Tensor], float | None, float], Optimizer]

    @property
    def wants(self) -> str:
        return self.kind

    def check(self, optimiser: Optimizer, missing: Collection[str]) -> None:
        if not self.fits(optimiser):
            raise AttachError(
                f"this method is made for {self.kind}, got {type(optimiser).__name__}: build the optimiser"
                " anew, or take error_fed(...), which goes with any"
            )

    def make(self, parameters: list[Tensor], *, lr: float | None, weight_decay: float) -> Optimizer:
        return self.build(parameters, lr, weight_decay)

    def bind(self, layout: Layout, view: OptimiserView, site: Site) -> BoundRule:
        return OnlyAsks()
