"""Decisions: what methods say in plain words while they train, kept for the thread that reports.

A method may speak from the thread that communicates; a worker's pipe takes one sender at a time.
"""

from __future__ import annotations

import logging
import queue

LOGGER = logging.getLogger("laconic")


class Decisions(logging.Handler):
    """Collects what the logger "laconic" is told at level INFO, from any thread.

    >>> heard = Decisions()
    >>> LOGGER.info("fp16 from now on")
    >>> heard.take()
    ['fp16 from now on']
    >>> heard.close()
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        if LOGGER.getEffectiveLevel() > logging.INFO:
            LOGGER.setLevel(logging.INFO)
        LOGGER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._said.put(record.getMessage())

    def take(self) -> list[str]:
        """What was said since the last call, in order."""
        return [self._said.get_nowait() for _ in range(self._said.qsize())]

    def close(self) -> None:
        LOGGER.removeHandler(self)
        super().close()
