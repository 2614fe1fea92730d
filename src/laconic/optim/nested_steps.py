"""Hooks of optimisers whose `step` calls their parent's: torch may run them in both.

It does so only if the script has also built an optimiser of the parent's class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim import Optimizer

Hook = Callable[..., Any]
WRAPPER = Optimizer.profile_hook_step(lambda: None).__code__


def outermost(hook: Hook) -> Hook:
    def run(optimizer: Optimizer, *args: Any) -> Any:
        return None if _is_nested(optimizer) else hook(optimizer, *args)

    return run


def _is_nested(optimizer: Optimizer) -> bool:
    steps = (vars(kind).get("step") for kind in type(optimizer).__mro__)
    if sum(getattr(step, "hooked", False) for step in steps) < 2:
        return False
    depth = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        depth += frame.f_code is WRAPPER and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return depth > 1
