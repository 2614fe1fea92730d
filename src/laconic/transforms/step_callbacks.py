"""Callbacks of a transform around the steps of its optimiser, or after those of any optimiser."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from laconic.optim.closure import evaluated
from laconic.optim.step_watch import StepWatch
from laconic.optim.unwrapping import after_steps, before_steps, is_skipped

Listener = Callable[[frozenset[int]], None]  # the ids of the optimiser's parameters

_listeners: list[Listener] = []
_lock = threading.Lock()  # ranks can be threads


class StepCallbacks:
    """Hooks that call `before` and `after` around each step, without gradients.

    A closure is evaluated first, so `before` sees the gradients; `first`: ahead of earlier hooks. A step that
    a GradScaler skips calls only `skipped`. Many backward passes without a step give a Python warning.
    """

    def __init__(
        self,
        feature: str,
        optimizer: Optimizer,
        parameters: Iterable[Tensor],
        before: Callable[[], object],
        after: Callable[[], object],
        skipped: Callable[[], object] = bool,
        *,
        first: bool = False,
    ) -> None:
        self._callbacks = before, after, skipped
        self._watch = StepWatch(feature, optimizer, parameters)
        self._hooks = (
            before_steps(optimizer, self._before_step, first=first),
            after_steps(optimizer, self._after_step),
        )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._watch.remove()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = evaluated(optimizer, args, kwargs)
        if not is_skipped(optimizer):
            with torch.no_grad():
                self._callbacks[0]()
        return args, kwargs

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _, after, skipped = self._callbacks
        if is_skipped(optimizer):
            self._watch.skipped()
            skipped()
        else:
            self._watch.stepped()
            after()


def after_each_step(listener: Listener) -> None:
    """Call `listener` after each `optimizer.step()`. Registering twice has no effect."""
    with _lock:
        if not _listeners:
            register_optimizer_step_post_hook(_after_step)
        if listener not in _listeners:
            _listeners.append(listener)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = frozenset(id(each) for group in optimizer.param_groups for each in group["params"])
    for listener in [*_listeners]:
        listener(held)
