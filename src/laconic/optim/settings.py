"""Checks of optimiser settings. Any library's real numbers are accepted."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any

from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import SpecError

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


def at_least_zero(**given: Any) -> None:
    """Raise `SpecError` unless all values are finite and 0 or more.

    >>> at_least_zero(lr=0.1, l1=0)
    """
    for name, value in given.items():
        arguments.number(name, real_number(value), least=0)


def above_zero(**given: Any) -> None:
    for name, value in given.items():
        arguments.number(name, real_number(value), above=0)


def two_shares(name: str, given: Any) -> None:
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise SpecError(f"{name} must be two numbers, such as (0.9, 0.999), got {arguments.shown(given)}")
    for place, value in enumerate(given):
        arguments.number(f"{name}[{place}]", real_number(value), least=0, below=1)


def real_number(value: Any) -> Any:
    """Return another library's real number as a float."""
    return float(value) if isinstance(value, Real) and not isinstance(value, int) else value
