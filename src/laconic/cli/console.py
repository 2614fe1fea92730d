"""The consoles that commands print to: as wide as the terminal, or wide enough for a table in a pipe."""

from __future__ import annotations

from rich.console import Console

PLAIN_WIDTH = 160  # columns


def console() -> Console:
    """Standard output."""
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = PLAIN_WIDTH
    return screen


def errors() -> Console:
    """Standard error. Its lines are never wrapped."""
    return Console(stderr=True, highlight=False, soft_wrap=True)
