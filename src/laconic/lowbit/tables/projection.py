"""The nearest weights alpha * q with q from a table: ADMM's step in G, by alternation.

    alpha <- v.q / (q.q)        the best scale of these entries
    q     <- the table's nearest entry to v / alpha

Neither half can raise |v - alpha q|^2, so the alternation settles, in a local optimum; it is started from a
few scales, and the best result is taken. Sums are float64, so that ranks which add in another order (with
another number of threads, say) round to the same float32 alpha.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.lowbit.tables.tables import Table

STARTS = (1.0, 2.0)  # first scales, of the mean |v| over the table's mean |entry|


def project(v: Tensor, table: Table, rounds: int = 5) -> tuple[Tensor, Tensor]:
    """Scales float32 (r, 1) and entries int8 (r, n) with alpha * q near v (r, n), a scale for each row.

    Scales are not negative; a row of zeros has scale 0. Zero counts as positive where the table lacks it.

    >>> from laconic.lowbit.tables.tables import TABLES
    >>> alpha, q = project(torch.tensor([[0.5, -0.7, 0.01, 0.6]]), TABLES["ternary"])
    >>> round(alpha.item(), 3), q.tolist()
    (0.6, [[1, -1, 0, 1]])
    """
    mean = v.abs().mean(1, keepdim=True, dtype=torch.float64)
    typical = sum(map(abs, table.values)) / len(table.values)
    found = [_settled(v, (start * mean / typical).float(), table, rounds) for start in STARTS]
    (alpha, q), best = found[0], _explained(v, found[0][1])
    for other_alpha, other_q in found[1:]:
        explained = _explained(v, other_q)
        better = explained > best
        alpha, q = torch.where(better, other_alpha, alpha), torch.where(better, other_q, q)
        best = torch.where(better, explained, best)
    return alpha, q


def nearest(v: Tensor, alpha: Tensor, table: Table) -> Tensor:
    """The table's nearest entries int8 (r, n) to v / alpha, with alpha (r, 1); a tie goes up."""
    scaled = torch.where(alpha > 0, v / alpha, torch.zeros_like(v))
    middles = torch.tensor(table.midpoints, dtype=v.dtype, device=v.device)
    values = torch.tensor(table.values, dtype=torch.int8, device=v.device)
    return values[torch.bucketize(scaled, middles, right=True)]


def best_scale(v: Tensor, q: Tensor) -> Tensor:
    """v.q / (q.q) for each row, float32 (r, 1); 0 where q is zero."""
    wide = q.double()
    return ((v * wide).sum(1, keepdim=True) / wide.square().sum(1, keepdim=True).clamp(min=1)).float()


def _settled(v: Tensor, alpha: Tensor, table: Table, rounds: int) -> tuple[Tensor, Tensor]:
    q = nearest(v, alpha, table)
    for _ in range(rounds):
        alpha = best_scale(v, q)
        q = nearest(v, alpha, table)
    return best_scale(v, q), q


def _explained(v: Tensor, q: Tensor) -> Tensor:
    """(v.q)^2 / (q.q) for each row, float64 (r, 1): what alpha * q takes away of |v|^2."""
    wide = q.double()
    return (v * wide).sum(1, keepdim=True).square() / wide.square().sum(1, keepdim=True).clamp(min=1)
