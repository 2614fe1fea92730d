"""This rank's gradients before a step: are they finite, and are they scaled?"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.optim.master_weights import masters_of
from laconic.strategies.several import each_of


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """Of the parameters that have one."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def step_unscaled(optimizer: Optimizer, scale: Tensor | None) -> None:
    """The step of an optimiser or several, by gradients times `scale`; None: they are unscaled already.

    Master weights take the scale away in float32.
    """
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
    """Divide its gradients by a GradScaler's scale."""
    for grad in gradients(optimizer):
        grad.div_(scale)


def all_finite(grads: Iterable[Tensor]) -> bool:
    """Whether all entries of all gradients are."""
    parts = (grad.coalesce().values() if grad.is_sparse else grad for grad in grads)
    largest = nn.utils.get_total_norm([part for part in parts if part.numel()], norm_type=torch.inf)
    return bool(torch.isfinite(largest))
