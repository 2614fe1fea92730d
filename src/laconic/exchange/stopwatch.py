"""Seconds of an exchange, by the host's clock, or on a GPU by events of sampled steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.cuda import Event

from laconic.comm.metered import Metered, StreamClock

Interval: TypeAlias = tuple[Event, Event]
EVERY = 8  # steps: on a GPU the first 8 are measured, then one in 8


@dataclass
class Seconds:
    """Seconds of the exchanges, by phase; on a GPU counted without waiting."""

    encode_s: float = 0.0
    communicate_s: float = 0.0
    decode_s: float = 0.0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: deque[tuple[Event, Sequence[Interval], Event, int]] = deque()

    def so_far(self) -> dict[str, float]:
        self._count()
        return {"encode_s": self.encode_s, "communicate_s": self.communicate_s, "decode_s": self.decode_s}

    def plus(self, other: Seconds) -> Seconds:
        mine, others = self.so_far(), other.so_far()
        return Seconds(*(mine[name] + others[name] for name in mine))

    def add(self, began: float, ended: float, first: float | None, busy: float) -> None:
        """Add an exchange: start, end, start of the first collective, and seconds in all collectives."""
        self.encode_s += (ended if first is None else first) - began
        if first is not None:
            self.communicate_s += busy
            self.decode_s += ended - first - busy

    def add_events(
        self, began: Event, collectives: Sequence[Interval], ended: Event, weight: int = 1
    ) -> None:
        self._under_way.append((began, collectives, ended, weight))
        self._count()

    def _count(self) -> None:
        with self._lock:
            while self._under_way and self._under_way[0][2].query():  # type: ignore[no-untyped-call]
                began, collectives, ended, weight = self._under_way.popleft()
                first = collectives[0][0] if collectives else ended
                busy = sum(start.elapsed_time(end) for start, end in collectives)
                self.encode_s += began.elapsed_time(first) * weight / 1e3
                self.communicate_s += busy * weight / 1e3
                self.decode_s += (first.elapsed_time(ended) - busy) * weight / 1e3


class Stopwatch:
    def __init__(self, seconds: Seconds, comm: Metered, device: torch.device, step: int) -> None:
        self._seconds, self._comm = seconds, comm
        self._on_gpu = device.type == "cuda"
        self._weight = weight_of(step)
        self._clock = StreamClock(device) if self._on_gpu and self._weight else None
        comm.mark(self._clock)
        if self._clock is not None:
            self._event = self._clock.now()
        elif not self._on_gpu:
            self._began = time.perf_counter()

    def stop(self) -> None:
        if self._clock is not None:
            collectives = self._comm.events_since_mark()
            self._seconds.add_events(self._event, collectives, self._clock.now(), self._weight)
        elif not self._on_gpu:
            self._seconds.add(self._began, time.perf_counter(), *self._comm.since_mark())


def weight_of(step: int) -> int:
    """Return how many steps this step's events count for; 0 if it is not measured.

    >>> [weight_of(step) for step in (0, 7, 8, 9, 16)]
    [1, 1, 8, 0, 8]
    """
    if step < EVERY:
        return 1
    return EVERY if step % EVERY == 0 else 0
