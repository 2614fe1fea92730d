"""Warnings at the line of the script that has called Laconic."""

from __future__ import annotations

import sys
import warnings

BETWEEN = ("laconic", "torch", "contextlib", "functools")  # packages whose lines a user cannot change


def warn(message: str) -> None:
    """Warn at the innermost line of other code: that of the script, or of a trainer.

    `warnings.warn(stacklevel=...)` counts frames, and decorators, hooks and torch's own calls add some.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
