"""Guard of a wrapped optimiser: it must step through its wrapper, or ranks would diverge."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic.core.errors import AttachError
from laconic.optim.unwrapping import before_steps
from laconic.strategies.first_steps import FirstSteps


class OnlyThrough:
    def __init__(self, optimizers: Iterable[Optimizer], strategy: object) -> None:
        self._inside = False
        self._hooks: list[RemovableHandle | FirstSteps] = []
        for each in optimizers:
            self._hooks += [before_steps(each, self._check), FirstSteps(each, repr(strategy))]

    def __enter__(self) -> None:
        self._inside = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = False

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._inside:
            raise AttachError(
                f"this {type(optimizer).__name__} was passed to laconic.distribute(), and would step this"
                " rank alone: step the optimiser that it returned, as model, optimizer ="
                " laconic.distribute(...), or call its remove() first"
            )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
