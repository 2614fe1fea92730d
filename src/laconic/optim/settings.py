"""Arguments that every optimiser here checks alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from laconic.core.errors import SpecError

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


def at_least_zero(**given: float) -> None:
    """Raise `SpecError` for the first of these that is below zero or not a finite number.

    >>> at_least_zero(lr=0.1, l1=0.0)
    """
    for name, value in given.items():
        if not 0 <= value < float("inf"):
            raise SpecError(f"{name} must be a finite number of 0 or more, got {value}")


def share(**given: float) -> None:
    """Raise `SpecError` for the first of these that is not in [0, 1)."""
    for name, value in given.items():
        if not 0 <= value < 1:
            raise SpecError(f"{name} must be in [0, 1), got {value}")


def above_zero(**given: float) -> None:
    """Raise `SpecError` for the first of these that is not a finite number above zero."""
    for name, value in given.items():
        if not 0 < value < float("inf"):
            raise SpecError(f"{name} must be a finite number above 0, got {value}")
