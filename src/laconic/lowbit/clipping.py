"""Master weights stay in [-1, 1]: clipped after each step of whatever optimiser holds them.

After each step of an optimiser the weights that it holds are clipped in the layers that are watched; a layer
that is gone is not watched any more.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from laconic.core.step_listeners import after_each_step
from laconic.optim.step_watch import StepWatch


class Clipped(Protocol):
    """A layer with master weights."""

    def masters(self) -> Iterable[nn.Parameter]:
        """The weights that stay in [-1, 1]."""
        ...


_watched: weakref.WeakKeyDictionary[Any, StepWatch] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # ranks can be threads


def watch(layer: Clipped) -> None:
    """Clip this layer's master weights now, and after each step of an optimiser that has them."""
    clip(layer)
    with _lock:
        if layer not in _watched:
            _watched[layer] = StepWatch("clipping of binarised weights", None, layer.masters())
    after_each_step(_after_step)


def leave(layer: Clipped) -> None:
    """Do not clip this layer's weights any more."""
    with _lock:
        if (steps := _watched.pop(layer, None)) is not None:
            steps.remove()


@torch.no_grad()
def clip(layer: Clipped) -> None:
    """Clip this layer's master weights."""
    for weight in layer.masters():
        weight.clamp_(-1, 1)


@torch.no_grad()
def _after_step(held: frozenset[int]) -> None:
    with _lock:
        layers = [*_watched.items()]
    for layer, steps in layers:
        for weight in layer.masters():
            if id(weight) in held:
                steps.stepped()
                weight.clamp_(-1, 1)
