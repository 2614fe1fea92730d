"""Clipping of master weights to [-1, 1] after each step of their optimiser."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from laconic.optim.step_watch import StepWatch
from laconic.transforms.step_callbacks import after_each_step


class Clipped(Protocol):
    def masters(self) -> Iterable[nn.Parameter]: ...


_watched: weakref.WeakKeyDictionary[Any, StepWatch] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # ranks can be threads


def watch(layer: Clipped) -> None:
    clip(layer)
    with _lock:
        if layer not in _watched:
            _watched[layer] = StepWatch("clipping of binarised weights", None, layer.masters())
    after_each_step(_after_step)


def unwatch(layer: Clipped) -> None:
    with _lock:
        if (steps := _watched.pop(layer, None)) is not None:
            steps.remove()


@torch.no_grad()
def clip(layer: Clipped) -> None:
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
