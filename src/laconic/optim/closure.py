"""Closures of `step`, which are evaluated once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from laconic.core.errors import AttachError

T = TypeVar("T")


def evaluate(closure: Callable[[], T] | None) -> T | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def evaluated(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a hook of `step`, with the closure replaced by its result, for later hooks.

    Raises `AttachError` for LBFGS, which needs the closure many times.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    refuse_lbfgs(optimizer, "what exchanges or changes gradients")
    loss = evaluate(closure)
    return (args[0], lambda: loss), {key: kwargs[key] for key in kwargs if key != "closure"}


def refuse_lbfgs(optimizer: Optimizer, feature: str) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise AttachError(
            f"LBFGS evaluates the model many times in one step, and {feature} must act between gradient and"
            " step: use SGD, Adam or another optimiser with one gradient per step"
        )
