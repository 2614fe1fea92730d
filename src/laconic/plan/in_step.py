"""Rules that exchange inside the optimiser's step, as 1-bit Adam's momentum, in a rehearsal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.exchange.method import Method
from laconic.exchange.rule import Site
from laconic.exchange.stopwatch import Seconds


class InStep:
    """A model of this layout whose optimiser has stepped once, and what a method's rules do in its place.

    Without such rules there is no optimiser: to make one, torch imports its compiler for seconds.
    """

    optimiser: Optimizer

    def __init__(self, method: Method, layout: Layout, comm: Metered) -> None:
        governed = [pair for pair in method.governed(layout) if pair[0].exchanges_in_step]
        self._layout = layout
        self._parameters: dict[str, Tensor] = {}
        if governed:
            self._parameters = {
                entry.name: nn.Parameter(torch.zeros(entry.shape, dtype=torch.float32, device="cpu"))
                for entry in layout
            }
            own = [*self._parameters.values()]
            made = governed[0][0].make(own, lr=None, weight_decay=0.0)
            self.optimiser = made or torch.optim.SGD(own, lr=0.1, momentum=0.9)
            for parameter in own:
                parameter.grad = torch.ones_like(parameter)
            self.optimiser.step()  # its state exists then, as after a warm-up
        self._rules = [rule.bind(part, self, Site(comm, 0, Seconds())) for rule, part in governed]

    def step_(self, bucket: Tensor, step: int) -> None:
        """The rules' step with this gradient, float32 (n,)."""
        if not self._rules:
            return
        for name, view in zip(self._layout.names, self._layout.segments.views(bucket), strict=True):
            grad = self._parameters[name].grad
            assert grad is not None
            grad.copy_(view.view(grad.shape))
        for rule in self._rules:
            rule.step_(step)

    def parameter(self, name: str) -> Tensor:
        """The model's parameter of this name."""
        return self._parameters[name]

    def holds(self, name: str) -> bool:
        """The optimiser has them all."""
        return name in self._parameters

    def settings(self, name: str) -> Mapping[str, Any]:
        """The optimiser's settings; without rules, those of SGD."""
        return {"lr": 0.1, "momentum": 0.9} if not self._parameters else self.optimiser.param_groups[0]

    def take_momentum(self, name: str) -> Tensor | None:
        """None: the optimiser's momentum stays where it is."""
        return None

    def give_momentum(self, name: str, buffer: Tensor) -> None:
        """Nothing was taken."""
