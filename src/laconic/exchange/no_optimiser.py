"""Exchanges without an optimiser: outer steps, replicas of shards, torchft."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.exchange.method import Method
from laconic.exchange.rule import OptimiserView


class NoOptimiser:
    """Replacement for an optimiser, without momentum and steps.

    >>> NoOptimiser({"lr": 0.1}).settings("weight")
    {'lr': 0.1}
    """

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self._settings = settings or {}

    def settings(self, name: str) -> Mapping[str, Any]:
        return self._settings

    def momentum_buffer(self, name: str) -> Tensor | None:
        return None

    def continues_momentum(self, name: str) -> bool:
        return bool(self._settings.get("momentum"))

    def set_momentum_buffer(self, name: str, value: Tensor) -> None:
        """Do nothing."""

    def why_in_optimizer(self, name: str) -> str | None:
        return None if self._settings.get("momentum") else ""

    def held(self, name: str) -> bool:
        return True

    def hand_over(self, names: Collection[str], decay: dict[str, Tensor], *, keep: bool) -> Collection[str]:
        return ()

    def views(self, layout: Layout) -> Iterable[tuple[OptimiserView, Layout]]:
        return ()

    def before_steps(self, act: Callable[[OptimiserView], Iterable[str]]) -> None:
        """Do nothing."""

    def on_masters(self) -> AbstractContextManager[None]:
        return nullcontext()


MOMENTUM_SGD = NoOptimiser({"lr": 0.1, "momentum": 0.9, "nesterov": False})


def refuse_optimised(method: Method, where: str) -> None:
    """Raise `AttachError` for a method that changes how the optimiser steps, or applies its momentum."""
    if any(route.rule is not None or route.feedback.needs_optimiser for route in method.routes):
        raise AttachError(
            f"{method} cannot be used {where}: it changes how the optimiser steps; use cgx(bits=4), or"
            " topk(density=0.01), which has error feedback"
        )
