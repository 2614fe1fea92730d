"""Checks at each step of a compressed model: all stepped parameters are exchanged, and steps happen.

Parameters unfrozen or added after DistributedDataParallel was built would make replicas diverge.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.core.errors import AttachError
from laconic.optim.master_weights import masters_of
from laconic.optim.step_watch import StepWatch
from laconic.optim.unwrapping import after_steps, before_steps, is_skipped, stepping


class StepChecks:
    def __init__(
        self,
        model: DistributedDataParallel,
        exchanged: Collection[Tensor],
        optimizers: Sequence[Optimizer],
        method: str,
    ) -> None:
        self._model = weakref.ref(model)
        self._exchanged = set(exchanged)
        self._ignored = set(getattr(model, "parameters_to_ignore", ()))
        self._outside: set[Tensor] = set()  # such as a loss's parameters
        self._watch = StepWatch(f"laconic.compress with {method}", optimizers[0], exchanged)
        self._hooks: list[RemovableHandle] = []
        for each in map(stepping, optimizers):
            self._hooks += [before_steps(each, self._before, first=True), after_steps(each, self._after)]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._watch.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        masters = masters_of(optimizer)
        for held in (each for group in optimizer.param_groups for each in group["params"]):
            parameter = held if masters is None else masters.behind(held)
            if parameter in self._exchanged or parameter.grad is None or parameter in self._outside:
                continue
            if (name := self._name(parameter)) is None:
                self._outside.add(parameter)
            elif name not in self._ignored and parameter.requires_grad:
                raise AttachError(
                    f"{name} was frozen or missing when DistributedDataParallel was built, so ranks do not"
                    " exchange its gradient, and replicas would diverge: call the handle's remove(), build"
                    " DistributedDataParallel again with it unfrozen, then call compress() again"
                )

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_skipped(optimizer):
            self._watch.skipped()
        else:
            self._watch.stepped()

    def _name(self, parameter: Tensor) -> str | None:
        model = self._model()
        named = () if model is None else model.module.named_parameters()
        return next((name for name, each in named if each is parameter), None)
