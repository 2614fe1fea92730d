"""Exchanges without an optimiser: outer steps, replicas of shards, torchft."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.exchange.method import Method
from laconic.exchange.rule import OptimiserView


class NoOptimiser:
    """Replacement for an optimiser, without momentum and steps. It reports `settings`.

    >>> NoOptimiser({"lr": 0.1}).settings("weight")
    {'lr': 0.1}
    """

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        self._settings = settings or {}

    def settings(self, name: str) -> Mapping[str, Any]:
        """Return the settings, equal for every tensor."""
        return self._settings

    def take_momentum(self, name: str) -> Tensor | None:
        """No momentum."""
        return None

    def give_momentum(self, name: str, buffer: Tensor) -> None:
        """No momentum was taken."""

    def views(self, layout: Layout) -> Iterable[tuple[OptimiserView, Layout]]:
        """Return no optimisers."""
        return ()

    def before_steps(self, act: Callable[[OptimiserView], Iterable[str]]) -> None:
        """Do nothing: there are no steps."""

    def on_masters(self) -> AbstractContextManager[None]:
        """Do nothing: there are no master weights."""
        return nullcontext()


MOMENTUM_SGD = NoOptimiser({"lr": 0.1, "momentum": 0.9, "nesterov": False})


def refuse_optimised(method: Method, where: str) -> None:
    """Raise `AttachError` for a method that changes how the optimiser steps, or applies its momentum.

    `where`: the unsupported place, as in "between replicas of shards".
    """
    warm = method.warm_at
    if any(route.rule is not None or route.feedback.owns_momentum(warm) for route in method.routes):
        raise AttachError(
            f"{method} cannot be used {where}: it changes how the optimiser steps; use cgx(bits=4), or"
            " topk(density=0.01), which has error feedback"
        )
