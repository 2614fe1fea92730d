"""Rule that requires a kind of optimiser."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.exchange.rule import BoundRule, OnlyChecks, OptimiserView, Rule, RuleContext


@dataclass(frozen=True)
class Requires(Rule):
    """Rule for optimisers of one `kind`. `build(parameters, lr, weight_decay)` makes one at this rate or, for
    None, the usual one.
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
                f"this method needs {self.kind}, got {type(optimiser).__name__}: use that, or"
                " error_fed(...), which works with any optimiser"
            )

    def make(self, parameters: list[Tensor], *, lr: float | None, weight_decay: float) -> Optimizer:
        return self.build(parameters, lr, weight_decay)

    def bind(self, layout: Layout, view: OptimiserView, context: RuleContext) -> BoundRule:
        return OnlyChecks()
