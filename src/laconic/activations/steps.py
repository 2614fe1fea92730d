"""Steps of optimisers, told to the sessions that are alive.

One hook for all optimisers of the process, which torch calls after each `step()`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Container
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Watching(Protocol):
    """Who is told."""

    def stepped(self, held: Container[int]) -> None:
        """An optimiser that holds the parameters with these ids has stepped."""
        ...


_watching: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()  # ranks can be threads
_hooked = False


def watch(who: Watching) -> None:
    """Tell this one of each step from now on, while it is alive."""
    global _hooked
    with _lock:
        _watching.add(who)
        if not _hooked:
            register_optimizer_step_post_hook(_after_step)
            _hooked = True


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    with _lock:
        told = [*_watching]
    if told:
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for who in told:
            who.stepped(held)
