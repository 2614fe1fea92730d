"""Steps that change nothing, though the hooks around them run."""

from __future__ import annotations

from torch.optim import Optimizer


def is_skipped(optimizer: Optimizer) -> bool:
    """Whether the step in whose hook this is asked will change nothing: a GradScaler has found Inf or NaN.

    It does not call `step` of most optimisers then, but leaves the skipping to a fused one.
    """
    return bool(getattr(optimizer, "found_inf", False))
