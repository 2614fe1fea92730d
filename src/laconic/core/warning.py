"""Warnings located at the user's line."""

from __future__ import annotations

import sys
import warnings

BETWEEN = ("laconic", "torch", "contextlib", "functools")


def warn(message: str) -> None:
    """Warn at the innermost line outside of Laconic and torch.

    A fixed `stacklevel` would fail: decorators, hooks and torch add frames.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
