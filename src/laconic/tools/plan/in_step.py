"""Rehearsal of rules that exchange inside the optimiser's step, such as 1-bit Adam's momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.core.layout import Layout
from laconic.exchange.method import Method
from laconic.exchange.no_optimiser import NoOptimiser
from laconic.exchange.rule import OptimiserView


class InStep(NoOptimiser):
    """Model whose optimiser has stepped once, and a method's rules, if any, that replace the step."""

    optimiser: Optimizer

    def __init__(self, method: Method, layout: Layout) -> None:
        super().__init__({"lr": 0.1, "momentum": 0.9, "nesterov": False})
        rules = [rule for rule in method.rules if rule.exchanges_in_step]
        self._act: Callable[[OptimiserView], Iterable[str]] | None = None
        self._layout = layout
        self._parameters: dict[str, Tensor] = {}
        if rules:  # else no optimiser: its creation imports torch's compiler, which takes seconds
            self._parameters = {
                entry.name: nn.Parameter(torch.zeros(entry.shape, dtype=torch.float32, device="cpu"))
                for entry in layout
            }
            own = [*self._parameters.values()]
            made = rules[0].make(own, lr=None, weight_decay=0.0)
            self.optimiser = made or torch.optim.SGD(own, lr=0.1, momentum=0.9)
            for parameter in own:
                parameter.grad = torch.ones_like(parameter)
            self.optimiser.step()

    def views(self, layout: Layout) -> Iterable[tuple[OptimiserView, Layout]]:
        return [(self, layout)] if self._parameters else []

    def before_steps(self, act: Callable[[OptimiserView], Iterable[str]]) -> None:
        self._act = act

    def step_(self, bucket: Tensor) -> None:
        if not self._parameters or self._act is None:
            return
        for name, view in zip(self._layout.names, self._layout.segments.views(bucket), strict=True):
            grad = self._parameters[name].grad
            assert grad is not None
            grad.copy_(view.view(grad.shape))
        self._act(self)

    def parameter(self, name: str) -> Tensor:
        return self._parameters[name]

    def holds(self, name: str) -> bool:
        return name in self._parameters

    def settings(self, name: str) -> Mapping[str, Any]:
        return self.optimiser.param_groups[0] if self._parameters else super().settings(name)
