"""Check that an optimiser's step is torch's own, before a method replaces it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from laconic.core.errors import AttachError


def steps_as(optimizer: Optimizer, *kinds: type[Optimizer], by: str = "step") -> bool:
    """Return whether the optimiser is of one of these kinds, with that kind's own method `by`.

    Subclasses with more settings pass, as do wrappers of torch, schedulers, profilers and Accelerate.

    >>> from torch.optim import SGD
    >>> class Negated(SGD):
    ...     def step(self, closure=None): ...
    >>> weight = [__import__("torch").nn.Parameter()]
    >>> steps_as(SGD(weight), SGD), steps_as(Negated(weight), SGD)
    (True, False)
    """
    own = _innermost(getattr(optimizer, by, None), optimizer)
    parents = [kind for kind in kinds if isinstance(optimizer, kind)]
    return any(own is _innermost(getattr(kind, by), optimizer) for kind in parents)


def check_step(optimizer: Optimizer, *kinds: type[Optimizer], instead: str) -> None:
    """Raise `AttachError` if an optimiser of these kinds overrides its step. `instead`: the fix."""
    if steps_as(optimizer, *kinds):
        return
    parent = next(kind for kind in type(optimizer).__mro__ if kind in kinds)
    raise AttachError(
        f"this method does the step of {parent.__module__.partition('.')[0]}'s {parent.__name__} itself, and"
        f" {type(optimizer).__name__} has a step of its own, which would never run: use {parent.__name__}, or"
        f" {instead}"
    )


def _innermost(step: Any, optimizer: Optimizer) -> Callable[..., Any] | None:
    for _ in range(100):
        if inspect.ismethod(step):
            step = step.__func__
        elif isinstance(step, functools.partial):
            step = step.func
        elif hasattr(step, "__wrapped__"):
            step = inspect.unwrap(step)
        elif (patched := _patched(step, optimizer)) is not None:
            step = patched
        else:
            break
    found: Callable[..., Any] | None = step
    return found


def _patched(step: Any, optimizer: Optimizer) -> Any:
    for cell in getattr(step, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        bound = inspect.ismethod(value) and value.__self__ is optimizer
        if bound and value.__name__ == "step":
            return value
    return None
