"""Majorities of bits in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def majority(votes: Tensor, ties: Tensor) -> Tensor:
    """Winning bits uint8 (m,) of votes uint8 (voters, m)."""
    places = torch.arange(8, dtype=torch.uint8, device=votes.device)
    twice = 2 * (votes[:, :, None] >> places & 1).sum(dim=0)
    tie = (ties[:, None] >> places & 1).bool()
    won = torch.where(twice == len(votes), tie, twice > len(votes))
    return (won.to(torch.uint8) << places).sum(dim=1, dtype=torch.uint8)
