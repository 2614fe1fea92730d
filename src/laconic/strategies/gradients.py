"""Gradients of this rank before a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.optim.master_weights import masters_of
from laconic.strategies.several import each_of


def gradients(optimizer: Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def step_unscaled(optimizer: Optimizer, scale: Tensor | None) -> None:
    """Step with gradients divided by `scale`, if any: by master weights in float32."""
    for each in each_of(optimizer):
        if scale is not None and masters_of(each) is not None:
            each.grad_scale = scale  # type: ignore[attr-defined]  # as a GradScaler sets it
        elif scale is not None:
            unscale_(each, scale)
    try:
        optimizer.step()
    finally:
        for each in each_of(optimizer):
            vars(each).pop("grad_scale", None)


def unscale_(optimizer: Optimizer, scale: Tensor) -> None:
    for grad in gradients(optimizer):
        grad.div_(scale)


def all_finite(grads: Iterable[Tensor]) -> bool:
    parts = (grad.coalesce().values() if grad.is_sparse else grad for grad in grads)
    largest = nn.utils.get_total_norm([part for part in parts if part.numel()], norm_type=torch.inf)
    return bool(torch.isfinite(largest))
