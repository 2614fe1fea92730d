"""Proximal steps: a regulariser shrinks weights in the metric of AdaGrad's H, some to exactly zero.

    w = argmin_w  1/2 * sum_j H_j (w_j - z_j)^2 + c * |w|      |w| its l1 norm, or the l2 norm of each row

Duchi et al. 2011 (AdaGrad), sections 5.1 and 5.2 [recalled].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROUNDS = 60  # bisections, for a float32's bits


def soft(z: Tensor, threshold: Tensor) -> Tensor:
    """Return the l1 step: sign(z) * max(|z| - threshold, 0).

    >>> soft(torch.tensor([3.0, -0.5]), torch.tensor([1.0, 1.0])).tolist()
    [2.0, -0.0]
    """
    return z.sign() * (z.abs() - threshold).clamp_(min=0)


def block_soft(z: Tensor, h: Tensor, c: float) -> Tensor:
    """Return the l2 step of each row (a vector is one row): rows with |H z| <= c vanish.

    w_j = z_j H_j r / (H_j r + c), with r the norm of the new row: bisection solves
    sum_j (z_j H_j / (H_j r + c))^2 = 1.

    >>> block_soft(torch.tensor([[3.0, 4.0], [0.1, 0.0]]), torch.ones(2, 2), 1.0)
    tensor([[2.4000, 3.2000],
            [0.0000, 0.0000]])
    """
    rows = z.reshape(1, -1) if z.dim() < 2 else z.flatten(1)
    scaled, weight = (rows * h.reshape(rows.shape)).double(), h.reshape(rows.shape).double()
    vanishes = torch.linalg.vector_norm(scaled, dim=1, keepdim=True) <= c  # false for NaN
    low = torch.zeros_like(scaled[:, :1])
    high = torch.linalg.vector_norm(rows.double(), dim=1, keepdim=True)  # no row grows
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        above = (scaled / (weight * middle + c)).square().sum(dim=1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    shrunk = scaled * high / (weight * high + c)
    return torch.where(vanishes, 0.0, shrunk).to(z.dtype).reshape(z.shape)


def shrink(z: Tensor, h: Tensor, l1: float, l2: float) -> Tensor:
    """Return the proximal step for l1 or l2, scaled by the step size."""
    if l1:
        return soft(z, l1 / h)
    return block_soft(z, h, l2) if l2 else z


def regularised(parameters: list[Tensor], l1: float) -> list[dict[str, Any]]:
    weights = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups = [{"params": weights, "l1": l1}, {"params": others, "l1": 0.0}]
    return [group for group in groups if group["params"]]


def zero_share(parameters: list[Tensor]) -> float:
    """Return the share of zeros.

    >>> zero_share([torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0])])
    0.75
    """
    total = sum(parameter.numel() for parameter in parameters)
    zeros = sum(int((parameter == 0).sum()) for parameter in parameters)
    return zeros / total if total else 0.0
