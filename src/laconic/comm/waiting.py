"""Warnings of a rank that waits for others in a call that every rank must make."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ATTACHING = "a call that attaches, such as laconic.compress or laconic.distribute"
PATIENT_S = 15.0  # seconds; imports and data loading may make a rank late

log = logging.getLogger("laconic")


@contextmanager
def log_if_slow(rank: int, call: str) -> Iterator[None]:
    timer = threading.Timer(PATIENT_S, log.warning, (waiting_message(rank, call),))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def waiting_message(rank: int, call: str) -> str:
    """Return the warning of `log_if_slow`.

    >>> waiting_message(1, "finish()")[:59]
    'rank 1 has waited 15 s for the other ranks in finish(): eve'
    """
    return (
        f"rank {rank} has waited {PATIENT_S:g} s for the other ranks in {call}: every rank has to make this"
        " call, also one that writes no checkpoint and prints nothing. It fails at the timeout of the process"
        " group."
    )
