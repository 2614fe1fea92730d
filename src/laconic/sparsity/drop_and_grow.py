"""Drop and grow: one update of a mask that keeps its number of entries.

Evci et al. 2020, arXiv:1911.11134: of the entries in use, the smallest go; of all that are then not in use,
the dropped ones too, those with the highest score come. What is dropped and comes back keeps its value. Ours:
by the layout 2:4, what drops makes room among its own four neighbours, and one of these comes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.sparsity import fours
from laconic.sparsity.densities import Layout
from laconic.sparsity.draws import shuffled


def drop_and_grow(
    magnitude: Tensor, used: Tensor, score: Tensor, count: int, key: int, layout: Layout = "uniform"
) -> Tensor:
    """The next mask: `count` entries drop, and as many come.

    Args:
        magnitude: |w|, (n,).
        used: The present mask, bool (n,).
        score: How much each entry wants to be in use, (n,), finite.
        count: How many drop, at most as many as are in use.
        key: Decides between equal values, as the authors' noise does.
        layout: By "2:4", `used` has two of each four neighbours, and so has what is returned.

    Returns:
        bool (n,), with as many entries as `used`.

    >>> w, mask = torch.tensor([3.0, 1.0, 0.0, 0.0]), torch.tensor([True, True, False, False])
    >>> drop_and_grow(w.abs(), mask, torch.tensor([0.0, 1.0, 2.0, 5.0]), 1, key=0)
    tensor([ True, False, False,  True])
    """
    kept = largest(magnitude.masked_fill(~used, -1), int(used.sum()) - count, key)
    if layout == "2:4":
        return fours.filled(kept, score, key + 1)
    return kept | largest(score.masked_fill(kept, float(score.amin()) - 1), count, key + 1)


def largest(x: Tensor, count: int, key: int) -> Tensor:
    """Which entries of x (n,) are the `count` largest, bool (n,); among equal ones `key` chooses.

    The same on every rank: the choice depends on values alone, not on how a sort is done.
    """
    if count <= 0:
        return torch.zeros_like(x, dtype=torch.bool)
    least = x.kthvalue(x.numel() - count + 1).values
    found = x > least
    equal = (x == least).nonzero().flatten()
    wanted = count - int(found.sum())
    if wanted < equal.numel():
        equal = equal[shuffled(equal.numel(), key)[:wanted].to(x.device)]
    found[equal] = True
    return found
