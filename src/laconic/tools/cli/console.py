"""Consoles of the commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

PLAIN_WIDTH = 160


def console() -> Console:
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = PLAIN_WIDTH
    return screen


def errors() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def working(screen: Console, doing: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on a terminal, elsewhere one line on standard error; yield a setter of its text."""
    if not screen.is_terminal:
        errors().print(f"laconic: {doing}", style="dim", markup=False)
    with screen.status(doing, spinner="dots") as status:
        yield status.update
