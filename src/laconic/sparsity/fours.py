"""Of each four neighbours in a row of a weight two are in use: 2:4, by which sparse tensor cores multiply.

Mishra et al. 2021, arXiv:2104.08378. A row is what one output is computed from: of a convolution's weight
(outputs, inputs, height, width) it is (inputs * height * width), as `export` stores it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.sparsity.draws import generator


def divisible(weight: Tensor) -> bool:
    """Whether the rows of a weight (outputs, inputs, ...) are made of fours."""
    return weight.shape[1:].numel() % 4 == 0


def filled(kept: Tensor, score: Tensor, key: int) -> Tensor:
    """Two of each four: the kept ones, and beside them those with the highest score.

    Args:
        kept: bool (n,), at most two of each four.
        score: How much each entry wants to be in use, (n,), finite.
        key: Decides between equal scores, alike on every rank.

    Returns:
        bool (n,), with n / 2 entries.

    >>> filled(torch.tensor([False, True, False, False]), torch.tensor([1.0, 0.0, 3.0, 2.0]), key=0)
    tensor([False,  True,  True, False])
    """
    wanted = score.masked_fill(kept, torch.inf).view(-1, 4)
    luck = (
        torch.rand(wanted.shape, generator=generator(key), dtype=torch.float32, device="cpu")
        .argsort(1)
        .to(score.device)
    )
    order = wanted.gather(1, luck).argsort(dim=1, descending=True, stable=True)
    chosen = luck.gather(1, order[:, :2])
    return torch.zeros_like(wanted, dtype=torch.bool).scatter_(1, chosen, True).flatten()


def drawn(n: int, key: int) -> Tensor:
    """Two of each four at random, bool (n,), on the host."""
    return filled(
        torch.zeros(n, dtype=torch.bool, device="cpu"), torch.zeros(n, dtype=torch.float32, device="cpu"), key
    )
