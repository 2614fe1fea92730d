"""Events on one stream of a GPU."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Instant(Protocol):
    """The used part of torch.cuda.Event."""

    def query(self) -> bool:
        """Return whether the GPU has passed it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to a later one."""


class Instants:
    """Events on a GPU's current stream, which is cached because the lookup takes longer than an event."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def now(self) -> Instant:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event
