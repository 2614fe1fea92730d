"""2:4 sparsity: two of every four consecutive weights of a row are nonzero, as for sparse tensor cores.

Mishra et al. 2021, arXiv:2104.08378. A row has the weights of one output: inputs * height * width for a
convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.sparsity.draws import generator


def divisible(weight: Tensor) -> bool:
    return weight.shape[1:].numel() % 4 == 0


def complete_fours(kept: Tensor, score: Tensor, key: int) -> Tensor:
    """Return a 2:4 mask of the `kept` entries, bool (n,), completed by those with the highest finite score.

    `key` breaks ties.

    >>> complete_fours(torch.tensor([False, True, False, False]), torch.tensor([1.0, 0.0, 3.0, 2.0]), key=0)
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


def random_mask(n: int, key: int) -> Tensor:
    return complete_fours(
        torch.zeros(n, dtype=torch.bool, device="cpu"), torch.zeros(n, dtype=torch.float32, device="cpu"), key
    )
