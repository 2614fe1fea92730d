"""Warning for a feature that has seen no optimiser step in 100 backward passes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from laconic.core.warning import warn

PASSES = 100


class StepWatch:
    """Counter of backward passes until the first step; warns once if it does not come.

    `optimizer`: the expected one, or None for any; then it warns only if the parameters change.
    """

    def __init__(self, feature: str, optimizer: object, parameters: Iterable[Tensor]) -> None:
        self._feature = feature
        self._any = optimizer is None
        self._whose = "any optimiser" if optimizer is None else f"this {type(optimizer).__name__}"
        self._parameters = [each for each in parameters if each.requires_grad and each.is_leaf]
        self._versions = [each._version for each in self._parameters]
        self._passes: dict[int, int] = {}
        self._skipped = 0
        self._hooks: list[RemovableHandle] = []
        for each in self._parameters:
            self._hooks.append(each.register_post_accumulate_grad_hook(self._passed))  # type: ignore[no-untyped-call]

    def stepped(self) -> None:
        if self._hooks:
            self.remove()

    def skipped(self) -> None:
        self._skipped += 1

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._parameters.clear()

    def _passed(self, parameter: Any) -> None:
        count = self._passes[id(parameter)] = self._passes.get(id(parameter), 0) + 1
        if count >= PASSES and self._hooks:
            moved, reason = self._moved(), self._reason()
            self.remove()
            if self._any and not moved:
                return
            warn(
                f"{self._feature} has seen no step of {self._whose} in {PASSES} backward passes, so it"
                f" has done nothing: {reason}",
            )

    def _moved(self) -> bool:
        return any(each._version != old for each, old in zip(self._parameters, self._versions, strict=True))

    def _reason(self) -> str:
        if self._skipped:
            return f"the GradScaler has skipped all {self._skipped} steps: look for Inf and NaN in gradients"
        if self._moved():
            return (
                "the weights have changed, so something else steps them, such as a wrapper or a copy of the"
                " optimiser: give the optimiser whose step() the script calls"
            )
        return "the script has not called its step(), or adds up more passes than that for one step"
