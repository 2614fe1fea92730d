"""This rank's gradients before a step: are they finite, and are they scaled?"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """Of the parameters that have one."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def unscale_(optimizer: Optimizer, found_inf: bool) -> bool:
    """Undo the scale that a GradScaler has set, unless it found Inf or NaN; returns whether it did."""
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if not found_inf and scale is not None:
        for grad in gradients(optimizer):
            grad.div_(scale)
    return found_inf


def all_finite(grads: Iterable[Tensor]) -> bool:
    """Whether all entries of all gradients are."""
    parts = (grad.coalesce().values() if grad.is_sparse else grad for grad in grads)
    largest = nn.utils.get_total_norm([part for part in parts if part.numel()], norm_type=torch.inf)
    return bool(torch.isfinite(largest))
