"""Base of AdaGrad with a regulariser that makes exact zeros."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from laconic.core.errors import SpecError
from laconic.optim.per_tensor import PerTensor
from laconic.optim.prox import regularised, zero_share
from laconic.optim.requires import Requires
from laconic.optim.settings import Parameters, above_zero, at_least_zero


class RegularisedAdaGrad(PerTensor):
    def __init__(
        self, params: Parameters, lr: float = 0.01, l1: float = 0.0, l2: float = 0.0, delta: float = 1e-6
    ) -> None:
        super().__init__(params, {"lr": lr, "l1": l1, "l2": l2, "delta": delta})

    def check(self, group: Mapping[str, Any]) -> None:
        l1, l2 = group["l1"], group["l2"]
        at_least_zero(lr=group["lr"], l1=l1, l2=l2)
        above_zero(delta=group["delta"])
        if l1 and l2:
            raise SpecError(f"choose l1 or l2, got l1={l1} and l2={l2}: use two parameter groups for them")

    @classmethod
    def requirement(cls) -> Requires:
        def usual(parameters: list[Tensor], lr: float | None, weight_decay: float) -> Optimizer:
            return cls(regularised(parameters, l1=1e-5), lr=0.01 if lr is None else lr)

        return Requires(f"laconic.optim.{cls.__name__}", lambda optimiser: isinstance(optimiser, cls), usual)

    def zero_share(self) -> float:
        return zero_share([w for group in self.param_groups for w in group["params"]])
