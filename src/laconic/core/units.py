"""Quantities with units in text: 1gbit, 2ms, 25.6M. Rates are in bits per second, sizes in bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from laconic.core.errors import SpecError

RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0}
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|\.[0-9]+)\s*([A-Za-z%]*)\s*")


def bits_a_second(name: str, text: str) -> float:
    """Parse a link's rate. Raises `SpecError` without a unit, or for 0.

    >>> bits_a_second("--link", "100mbit")
    100000000.0
    """
    return _read(name, text, RATES, "a rate such as 1gbit, 100mbit or 500kbit")


def seconds(name: str, text: str, *, least: float | None = None) -> float:
    """Parse a time above 0, or of at least `least`.

    >>> seconds("--delay", "2ms")
    0.002
    """
    return _read(name, text, TIMES, "a time such as 2ms, 1.5s or 300us", least)


def count(name: str, text: str) -> int:
    """Parse an integer, with k, M or B for thousands, millions and billions.

    >>> count("--params", "25.6M")
    25600000
    """
    return round(_read(name, text, COUNTS, "a count such as 25.6M, 350k or 1.3B"))


def share(name: str, text: str) -> float:
    """Parse a share from 0 to 1, as a number or in percent.

    >>> share("--loss", "1%")
    0.01
    """
    found = _read(name, text, {"": 1.0, "%": 0.01}, "a share such as 1% or 0.01", 0.0)
    if found > 1:
        raise SpecError(f"{name} must be at most 100%, got {text!r}")
    return found


def format_rate(bits: float) -> str:
    """Format a rate.

    >>> format_rate(1e9), format_rate(2.5e6)
    ('1 Gbit/s', '2.5 Mbit/s')
    """
    for size, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"


def format_count(number: float, noun: str) -> str:
    """Format a number of things.

    >>> format_count(1, "core"), format_count(0.5, "core"), format_count(1024, "worker")
    ('1 core', '0.5 cores', '1,024 workers')
    """
    return f"{number:,.10g} {noun}{'s' * (number != 1)}"


def format_seconds(value: float) -> str:
    """Format a time.

    >>> format_seconds(0.00213), format_seconds(12.0)
    ('2.13 ms', '12 s')
    """
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def _read(name: str, text: str, units: Mapping[str, float], form: str, least: float | None = None) -> float:
    found = FORM.fullmatch(text) if isinstance(text, str) else None
    unit = found[2].lower() if found else ""
    if found is None or unit not in units:
        raise SpecError(f"{name} must be {form}, got {text!r}")
    value = float(found[1]) * units[unit]
    if not math.isfinite(value) or (value <= 0 if least is None else value < least):
        raise SpecError(f"{name} must be {form}, and above 0, got {text!r}")
    return value
