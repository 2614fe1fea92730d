"""Save watch: warns if only some ranks have saved their memory, as by `if rank == 0:`.

A rank that saves increases a shared counter; after the next exchange has begun, all saves are complete.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from types import FrameType

from laconic.comm.counter import Counter
from laconic.core.errors import PeerError
from laconic.core.inference import outside_inference_mode
from laconic.core.warning import warn
from laconic.exchange.rule import OptimiserView

GATHER = "Call handle.state_dict(gather=True) on all ranks and save it on rank 0, or save one file a rank"


def saved_by_rank_0() -> bool:
    """Return whether Accelerate's `register_for_checkpointing` is saving: it writes only rank 0's state."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == outside_inference_mode.__module__:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "accelerate.checkpointing"


class SaveWatch:
    def __init__(self, counter: Counter, size: int, fix: str = GATHER) -> None:
        self._counter, self._size, self._fix = counter, size, fix
        self._mine = 0
        self._saved_at: int | None = None
        self._warned = False

    def saved(self, step: int) -> None:
        self._mine += 1
        self._saved_at = step
        with suppress(PeerError):  # the run has ended
            self._counter.add(1)

    def before_step(self, optimiser: OptimiserView, step: int) -> None:
        self.check(step)

    def check(self, step: int) -> None:
        if self._saved_at is None or step < self._saved_at or self._warned:
            return
        saved_at, self._saved_at = self._saved_at, None
        missing = 0
        with suppress(PeerError):
            missing = self._size * self._mine - self._counter.add(0)
        if missing > 0:
            self._warned = True
            warn(
                f"this rank saved its memory at step {saved_at}, and other ranks did not: a checkpoint that"
                f" one rank writes lacks theirs. {self._fix}"
            )
