"""Stopwatch: the seconds of one exchange, by the host's clock, or on a GPU by events of sampled steps."""

from __future__ import annotations

import time

import torch

from laconic.comm.instants import Instants
from laconic.comm.metered import Metered
from laconic.exchange.stats import Seconds

EVERY = 8  # steps: on a GPU the first of them are measured, then one of each


class Stopwatch:
    """Starts at once. On a GPU it measures one step in `EVERY`, which counts for all of them."""

    def __init__(self, seconds: Seconds, comm: Metered, device: torch.device, step: int) -> None:
        self._seconds, self._comm = seconds, comm
        self._on_gpu = device.type == "cuda"
        self._weight = weight_of(step)
        self._instants = Instants(device) if self._on_gpu and self._weight else None
        comm.mark(self._instants)
        if self._instants is not None:
            self._event = self._instants.now()
        elif not self._on_gpu:
            self._began = time.perf_counter()

    def stop(self) -> None:
        """Count the seconds since the start."""
        if self._instants is not None:
            collectives = self._comm.events_since_mark()
            self._seconds.add_events(self._event, collectives, self._instants.now(), self._weight)
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
