"""Exchanges without an optimiser: of outer steps, between replicas of shards, under a manager of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from laconic.core.errors import AttachError
from laconic.exchange.method import Method


class NoOptimiser:
    """Stands for the optimiser towards feedback: what is exchanged has no momentum of its own."""

    def settings(self, name: str) -> Mapping[str, Any]:
        """No settings."""
        return {}

    def take_momentum(self, name: str) -> Tensor | None:
        """No momentum."""
        return None

    def give_momentum(self, name: str, buffer: Tensor) -> None:
        """No momentum was taken."""


def refuse_optimised(method: Method, where: str) -> None:
    """Raise `AttachError` for a method that changes how the optimiser steps, or applies its momentum.

    `where` it cannot go, as in "between replicas of shards".
    """
    warm = method.warm_at
    if any(route.rule is not None or route.feedback.owns_momentum(warm) for route in method.routes):
        raise AttachError(
            f"{method} cannot go {where}: it changes how the optimiser steps; take cgx(bits=4), or"
            " topk(density=0.01), which has error feedback"
        )
