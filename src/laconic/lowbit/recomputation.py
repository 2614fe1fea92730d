"""Calls that activation checkpointing repeats in backward: each has the random bits of its first time."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

CALLS = 512  # the last ones are known again
PLACES = 64  # of an input, by whose values and the sum of all it is known


def repeated(training: bool) -> bool:
    """Whether a call in training repeats one of the forward pass: then autograd is at work."""
    return training and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0


class Repeats:
    """The turns of a layer's last calls in training, and by what their inputs are known."""

    def __init__(self) -> None:
        self._calls: deque[tuple[int, Tensor]] = deque(maxlen=CALLS)
        self._done: set[int] = set()  # turns that were repeated

    def turn(self, now: int, again: bool, *inputs: Tensor) -> int:
        """The turn of a call with these inputs: `now`, or that of the call which is there again.

        Of several calls alike, backward repeats the last one first.
        """
        if torch.compiler.is_compiling():
            return now
        these = _known_by(inputs)
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
def _known_by(inputs: tuple[Tensor, ...]) -> Tensor:
    found = []
    for each in inputs:
        flat = each.detach().float().reshape(-1)
        found += [flat[:: max(1, len(flat) // PLACES)][:PLACES], flat.sum()[None]]
    return torch.cat(found)
