"""What a rank says that waits for others which may never come: each of them has to make the same call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ATTACHING = "a call that attaches, such as laconic.compress or laconic.distribute"
PATIENT_S = 15.0  # of silence; a rank may be late by its imports and the reading of its data

log = logging.getLogger("laconic")


@contextmanager
def told_if_long(rank: int, what: str) -> Iterator[None]:
    """Inside `with`, after PATIENT_S a line in the log says that this rank waits for the others in `what`."""
    told = threading.Timer(
        PATIENT_S,
        log.warning,
        (
            "rank %d has waited %g s for the other ranks in %s: every rank has to make this call, also one"
            " that writes no checkpoint and prints nothing. It fails at the timeout of the process group.",
            rank,
            PATIENT_S,
            what,
        ),
    )
    told.daemon = True
    told.start()
    try:
        yield
    finally:
        told.cancel()
        told.join()
