"""Interrupts: Ctrl-C and SIGTERM end a command, but never in the middle of writing something down.

An exception in the middle of a queue's `put` leaves its lock taken or freed twice: TensorBoard's writer then
hangs for ever when it is closed.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Inside `with`, both signals raise KeyboardInterrupt; inside `held()` they wait until that ends. One
    that was ignored, as of a command in the background, stays so.

    >>> with Interrupts() as interrupts:
    ...     try:
    ...         with interrupts.held():
    ...             signal.raise_signal(signal.SIGINT)
    ...             print("written")
    ...     except KeyboardInterrupt:
    ...         print("interrupted")
    written
    interrupted
    """

    def __init__(self) -> None:
        self._holds = self._due = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        heeded = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        self._before = {each: signal.signal(each, self._arrive) for each in heeded}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)

    @contextmanager
    def held(self) -> Iterator[None]:
        """What happens inside is done whole."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False
            if self._due:
                self._due = False
                raise KeyboardInterrupt

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        if not self._holds:
            raise KeyboardInterrupt
        self._due = True
