"""A closure of `step`, called before the step: so that what acts before the optimiser sees the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from laconic.core.errors import AttachError


def evaluated(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `step`, as a hook gets them; a closure has been called, and gives its result again.

    Raises `AttachError` for LBFGS, which calls it many times.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    if isinstance(optimizer, torch.optim.LBFGS):
        raise AttachError(
            "LBFGS calls its closure many times in one step, and each call would be an exchange of"
            " its own: use SGD, Adam or another optimiser with one gradient per step"
        )
    with torch.enable_grad():
        loss = closure()
    return (args[0], lambda: loss), {key: kwargs[key] for key in kwargs if key != "closure"}
