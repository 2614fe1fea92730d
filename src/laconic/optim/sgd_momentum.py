"""Requirement of methods with local momentum: SGD or LARS."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch.optim import SGD, Optimizer

from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.exchange.rule import BoundRule, OnlyChecks, OptimiserView, Rule, RuleContext, refuse_settings
from laconic.optim.lars import LARS
from laconic.optim.own_step import check_step, steps_as


@dataclass(frozen=True)
class SgdMomentum(Rule):
    """Rule that refuses optimisers whose momentum cannot be applied before the exchange."""

    @property
    def wants(self) -> str:
        return "torch.optim.SGD or laconic.optim.LARS"

    def check(self, optimiser: Optimizer, missing: Collection[str]) -> None:
        if not isinstance(optimiser, (SGD, LARS)):
            raise AttachError(
                f"this method continues the momentum of torch.optim.SGD, got {type(optimiser).__name__}: use"
                " SGD or laconic.optim.LARS; with Adam and AdamW take 'onebit_adam()', with any optimiser"
                " 'auto()' or 'cgx()'"
            )
        check_step(optimiser, SGD, LARS, instead="'cgx()', which works with any optimiser")
        if isinstance(optimiser, LARS) and not steps_as(optimiser, LARS, by="update_"):
            raise AttachError(
                f"this method does LARS's step itself, and {type(optimiser).__name__} has an update_ of its"
                " own: use LARS, or 'cgx()', which works with any optimiser"
            )
        refuse_settings(optimiser, ("differentiable", "dampening"), "applies SGD's momentum")

    def bind(self, layout: Layout, view: OptimiserView, context: RuleContext) -> BoundRule:
        return OnlyChecks()
