"""Bitwise majority vote."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels import checks, dispatch
from laconic.kernels.vote import reference


def majority(votes: Tensor, ties: Tensor) -> Tensor:
    """Return winning bits uint8 (m,) of votes uint8 (voters, m); bits of `ties` where votes are even.

    >>> votes = torch.tensor([[0b110], [0b010]], dtype=torch.uint8)
    >>> majority(votes, torch.tensor([0b001], dtype=torch.uint8)).tolist()
    [2]
    """
    voters, m = votes.shape
    checks.flat("votes", votes.view(-1), torch.uint8)
    checks.flat("ties", ties, torch.uint8)
    if voters < 1 or ties.numel() != m:
        raise ValueError(f"{voters} voters of {m} bytes need at least one voter and {m} bytes of ties")
    if (native := dispatch.native(votes, ties)) is not None:
        winners = torch.empty(m, dtype=torch.uint8, device="cpu")
        native.majority(votes, voters, ties, winners)
        return winners
    return reference.majority(votes, ties)
