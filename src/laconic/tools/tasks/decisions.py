"""Decisions that methods log, also from other threads; only one may write to a worker's pipe."""

from __future__ import annotations

import logging
import queue

LOGGER = logging.getLogger("laconic")


class Decisions(logging.Handler):
    """Log handler that collects INFO messages of "laconic", from any thread.

    >>> decisions = Decisions()
    >>> LOGGER.info("fp16 from now on")
    >>> decisions.pop_all()
    ['fp16 from now on']
    >>> decisions.close()
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        if LOGGER.getEffectiveLevel() > logging.INFO:
            LOGGER.setLevel(logging.INFO)
        LOGGER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.put(record.getMessage())

    def pop_all(self) -> list[str]:
        return [self._messages.get_nowait() for _ in range(self._messages.qsize())]

    def close(self) -> None:
        LOGGER.removeHandler(self)
        super().close()
