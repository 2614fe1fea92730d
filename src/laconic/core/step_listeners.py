"""Callbacks after each step of any optimiser of the process, by one torch hook."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

Listener = Callable[[frozenset[int]], None]  # takes the ids of the parameters that the optimiser holds

_listeners: list[Listener] = []
_lock = threading.Lock()  # ranks can be threads


def after_each_step(listener: Listener) -> None:
    """Call `listener` after each `optimizer.step()` from now on. Registering twice has no effect."""
    with _lock:
        if not _listeners:
            register_optimizer_step_post_hook(_after_step)
        if listener not in _listeners:
            _listeners.append(listener)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    held = frozenset(id(each) for group in optimizer.param_groups for each in group["params"])
    for listener in [*_listeners]:
        listener(held)
