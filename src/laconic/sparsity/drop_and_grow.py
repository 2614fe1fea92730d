"""Drop and grow: one update of a mask.

Evci et al. 2020, arXiv:1911.11134: the smallest entries drop; then the unused entries with the highest score
grow, perhaps just dropped ones, which keep their value. Ours: "2:4" replaces entries within their group of
four.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.sparsity import fours
from laconic.sparsity.densities import DensityLayout
from laconic.sparsity.draws import permutation


def drop_and_grow(
    magnitude: Tensor, used: Tensor, score: Tensor, count: int, key: int, layout: DensityLayout = "uniform"
) -> Tensor:
    """Return the next mask: `count` entries drop and `count` grow.

    All tensors are (n,): |w|, the mask, finite scores. `key` decides between equal values. With "2:4", both
    masks are 2:4.

    >>> w, mask = torch.tensor([3.0, 1.0, 0.0, 0.0]), torch.tensor([True, True, False, False])
    >>> drop_and_grow(w.abs(), mask, torch.tensor([0.0, 1.0, 2.0, 5.0]), 1, key=0)
    tensor([ True, False, False,  True])
    """
    kept = largest(magnitude.masked_fill(~used, -1), int(used.sum()) - count, key)
    if layout == "2:4":
        return fours.complete_fours(kept, score, key + 1)
    return kept | largest(score.masked_fill(kept, float(score.amin()) - 1), count, key + 1)


def largest(x: Tensor, count: int, key: int) -> Tensor:
    """Return a mask of the `count` largest entries of x (n,). `key` decides between equal ones, whose order
    in a sort may differ between ranks.
    """
    if count <= 0:
        return torch.zeros_like(x, dtype=torch.bool)
    least = x.kthvalue(x.numel() - count + 1).values
    found = x > least
    equal = (x == least).nonzero().flatten()
    wanted = count - int(found.sum())
    if wanted < equal.numel():
        equal = equal[permutation(equal.numel(), key)[:wanted].to(x.device)]
    found[equal] = True
    return found
