"""Random bits of calls repeated by activation checkpointing."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

MAX_CALLS = 512
SAMPLES = 64  # of an input's fingerprint


def is_recomputed(training: bool) -> bool:
    return training and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0


class RecomputedCalls:
    def __init__(self) -> None:
        self._calls: deque[tuple[int, Tensor]] = deque(maxlen=MAX_CALLS)
        self._done: set[int] = set()  # recomputed turns

    def turn(self, now: int, again: bool, *inputs: Tensor) -> int:
        """Return `now`, or the repeated call's turn.

        Among calls with equal inputs, backward repeats the last one first.
        """
        if torch.compiler.is_compiling():
            return now
        these = _fingerprint(inputs)
        if not again:
            self._calls.append((now, these))
            return now
        alike = [
            turn
            for turn, those in reversed(self._calls)
            if those.device == these.device and torch.equal(those, these)
        ]
        found = next((turn for turn in alike if turn not in self._done), alike[0] if alike else now)
        self._done = {turn for turn, _ in self._calls if turn in self._done or turn == found}
        return found


@torch.no_grad()
def _fingerprint(inputs: tuple[Tensor, ...]) -> Tensor:
    found = []
    for each in inputs:
        flat = each.detach().float().reshape(-1)
        found += [flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES], flat.sum()[None]]
    return torch.cat(found)
