"""Base of rules that communicate inside Adam's step."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from torch import Tensor
from torch.optim import Optimizer

from laconic.exchange.rule import Rule
from laconic.optim.adam_tensors import ADAM, check_adam, make_adam


class AdamRule(Rule):
    """Rule for a `torch.optim.Adam` or `AdamW` of all tensors."""

    exchanges_in_step: ClassVar[bool] = True

    @property
    def wants(self) -> str:
        return ADAM

    def check(self, optimiser: Optimizer, missing: Collection[str]) -> None:
        check_adam(optimiser, missing)

    def make(self, parameters: list[Tensor], *, lr: float | None, weight_decay: float) -> Optimizer:
        return make_adam(parameters, lr, weight_decay)
