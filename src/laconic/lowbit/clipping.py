"""Master weights stay in [-1, 1]: clipped after each step of whatever optimiser holds them.

One hook for all optimisers of the process, which torch calls after each `step()`. It looks at the layers
that are watched, and at the parameters that this optimiser has; a layer that is gone is not watched any more.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook


class Clipped(Protocol):
    """A layer with master weights."""

    def masters(self) -> Iterable[nn.Parameter]:
        """The weights that stay in [-1, 1]."""
        ...


_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = threading.Lock()  # ranks can be threads
_hooked = False


def watch(layer: Clipped) -> None:
    """Clip this layer's master weights now, and after each step of an optimiser that has them."""
    global _hooked
    with _lock:
        _watched.add(layer)
        if not _hooked:
            register_optimizer_step_post_hook(_after_step)
            _hooked = True
    clip(layer)


def leave(layer: Clipped) -> None:
    """Do not clip this layer's weights any more."""
    with _lock:
        _watched.discard(layer)


@torch.no_grad()
def clip(layer: Clipped) -> None:
    """Clip this layer's master weights."""
    for weight in layer.masters():
        weight.clamp_(-1, 1)


@torch.no_grad()
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    with _lock:
        layers = [*_watched]
    if not layers:
        return
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for layer in layers:
        for weight in layer.masters():
            if id(weight) in owned:
                weight.clamp_(-1, 1)
