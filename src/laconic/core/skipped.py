"""Optimiser steps that a GradScaler skips although their hooks run."""

from __future__ import annotations

from torch.optim import Optimizer


def is_skipped(optimizer: Optimizer) -> bool:
    """Return whether the current step, in whose hook this is called, is skipped for Inf or NaN.

    A GradScaler does not call `step` of most optimisers then, but a fused optimiser skips inside `step`.
    """
    return bool(getattr(optimizer, "found_inf", False))
