"""Checks of a spec's arguments. They raise `SpecError` with the argument, its limit and the value.

Numbers are Python's own finite `int` and `float`, as a printed spec with `inf` or `np.float64(0.1)` cannot be
parsed. `True` is not a number.
"""

from __future__ import annotations

import sys
from numbers import Real
from typing import Any

from laconic.core.errors import SpecError

MOST = (1 << 63) - 1
FAR = 100


def whole(name: str, value: Any, least: int = 0, most: int = MOST, hint: str = "") -> None:
    """Check for an integer from `least` to `most`, inclusive.

    >>> whole("levels", 7, 1, 255)
    >>> whole("levels", 7.5, 1, 255)
    Traceback (most recent call last):
    laconic.core.errors.SpecError: levels must be a whole number in 1..255, got 7.5
    """
    if type(value) is not int or not least <= value <= most:
        limit = f"of {least} or more, below 2^63" if most == MOST else f"in {least}..{most}"
        _refuse(name, f"a whole number {limit}", value, hint)


def number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    hint: str = "",
) -> None:
    """Check for a finite number: `least` and `most` inclusive, `above` and `below` not.

    >>> number("density", 0.01, above=0, most=1)
    >>> number("density", 1.5, above=0, most=1)
    Traceback (most recent call last):
    laconic.core.errors.SpecError: density must be a number in (0, 1], got 1.5
    """
    largest = sys.float_info.max
    if (
        type(value) not in (int, float)
        or not -largest <= value <= largest
        or (least is not None and value < least)
        or (above is not None and value <= above)
        or (most is not None and value > most)
        or (below is not None and value >= below)
    ):
        _refuse(name, _interval(least, above, most, below), value, hint)


def flag(name: str, value: Any) -> None:
    if type(value) is not bool:
        _refuse(name, "True or False", value, "")


def choice(name: str, value: Any, options: tuple[Any, ...], hint: str = "") -> None:
    """Check for one of the options, of the same type.

    >>> choice("norm", "l1", ("max", "l2"))
    Traceback (most recent call last):
    laconic.core.errors.SpecError: norm must be 'max' or 'l2', got 'l1'
    """
    if not any(type(value) is type(option) and value == option for option in options):
        *first, last = map(repr, options)
        _refuse(name, f"{', '.join(first)} or {last}" if first else last, value, hint)


def piece(name: str, value: Any, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        _refuse(name, f"a {kind.__name__.lower()}, such as {example}", value, "")


def names(name: str, value: Any, example: str) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise SpecError(f"{name} must be a list of names, such as {name}=[{example!r}], got {shown(value)}")


def shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 4 * FAR:  # Python cannot format very long integers
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= FAR else f"{text[: FAR - 3]}..."


def _interval(least: float | None, above: float | None, most: float | None, below: float | None) -> str:
    if most is None and below is None:
        return f"a finite number {f'above {above:g}' if least is None else f'of {least:g} or more'}"
    low = f"({above:g}" if least is None else f"[{least:g}"
    return f"a number in {low}, {below:g})" if most is None else f"a number in {low}, {most:g}]"


def _refuse(name: str, limit: str, value: Any, hint: str) -> None:
    kind: type = type(value)
    if isinstance(value, Real) and kind not in (int, float, bool):
        hint = "write it as Python's own number: int(...) or float(...)"
    raise SpecError(f"{name} must be {limit}, got {shown(value)}" + (f"; {hint}" if hint else ""))
