"""Interrupts: Ctrl-C and SIGTERM end a command, but not inside `held()`, which guards writes: an exception in
a queue's `put` can corrupt its lock, and TensorBoard's writer then hangs.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Inside `with`, both signals raise KeyboardInterrupt; inside `held()` they are delayed until it ends.

    Ignored signals stay ignored.

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
        self._holding = self._pending = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        active = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        self._before = {each: signal.signal(each, self._receive) for each in active}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)

    @contextmanager
    def held(self) -> Iterator[None]:
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
            if self._pending:
                self._pending = False
                raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._holding:
            raise KeyboardInterrupt
        self._pending = True
