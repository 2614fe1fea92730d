"""Projection to weights alpha * q with q from a table, by alternation.

    alpha <- v.q / (q.q)        best scale for q
    q     <- nearest table entry to v / alpha

The result is the better of the optima from two starting scales. Sums are float64, so that any order of
additions rounds to the same alpha.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.lowbit.tables.tables import Table

STARTS = (1.0, 2.0)  # relative to mean |v| / mean |table entry|


def project(v: Tensor, table: Table, rounds: int = 5) -> tuple[Tensor, Tensor]:
    """Return scales float32 (r, 1) and entries int8 (r, n) with alpha * q near v (r, n).

    Scales are non-negative, 0 for a row of zeros. Zero counts as positive if the table has no zero.

    >>> from laconic.lowbit.tables.tables import TABLES
    >>> alpha, q = project(torch.tensor([[0.5, -0.7, 0.01, 0.6]]), TABLES["ternary"])
    >>> round(alpha.item(), 3), q.tolist()
    (0.6, [[1, -1, 0, 1]])
    """
    mean = v.abs().mean(1, keepdim=True, dtype=torch.float64)
    typical = sum(map(abs, table.values)) / len(table.values)
    found = [_alternate(v, (start * mean / typical).float(), table, rounds) for start in STARTS]
    (alpha, q), best = found[0], _explained_norm(v, found[0][1])
    for other_alpha, other_q in found[1:]:
        explained = _explained_norm(v, other_q)
        better = explained > best
        alpha, q = torch.where(better, other_alpha, alpha), torch.where(better, other_q, q)
        best = torch.where(better, explained, best)
    return alpha, q


def nearest(v: Tensor, alpha: Tensor, table: Table) -> Tensor:
    """Return the table entries int8 (r, n) nearest to v / alpha; ties round up."""
    scaled = torch.where(alpha > 0, v / alpha, torch.zeros_like(v))
    middles = torch.tensor(table.midpoints, dtype=v.dtype, device=v.device)
    values = torch.tensor(table.values, dtype=torch.int8, device=v.device)
    return values[torch.bucketize(scaled, middles, right=True)]


def best_scale(v: Tensor, q: Tensor) -> Tensor:
    wide = q.double()
    return ((v * wide).sum(1, keepdim=True) / wide.square().sum(1, keepdim=True).clamp(min=1)).float()


def _alternate(v: Tensor, alpha: Tensor, table: Table, rounds: int) -> tuple[Tensor, Tensor]:
    q = nearest(v, alpha, table)
    for _ in range(rounds):
        alpha = best_scale(v, q)
        q = nearest(v, alpha, table)
    return best_scale(v, q), q


def _explained_norm(v: Tensor, q: Tensor) -> Tensor:
    wide = q.double()
    return (v * wide).sum(1, keepdim=True).square() / wide.square().sum(1, keepdim=True).clamp(min=1)
