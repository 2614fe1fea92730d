"""The console that commands print to: as wide as the terminal, or wide enough for a table in a pipe."""

from __future__ import annotations

from rich.console import Console

PLAIN_WIDTH = 160  # columns


def console() -> Console:
    """Standard output."""
    made = Console(highlight=False)
    if not made.is_terminal:
        made.width = PLAIN_WIDTH
    return made


def errors() -> Console:
    """Standard error, whose lines are never wrapped."""
    return Console(stderr=True, highlight=False, soft_wrap=True)
