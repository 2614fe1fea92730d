"""Majority vote in plain torch: eight byte counters are added as one int64."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from laconic.kernels.sign.reference import GATHER

MOST = 255  # voters that a byte can count


def majority(votes: Tensor, ties: Tensor) -> Tensor:
    half, lanes = len(votes) // 2, _lanes(votes.device)
    if len(votes) <= MOST:
        counts = _counted(votes, lanes)
    else:
        counts = torch.stack(
            [_counted(part, lanes).to(torch.int32) for part in torch.split(votes, MOST)]
        ).sum(0)
    won = counts > half
    if len(votes) % 2 == 0:
        coins = lanes.index_select(0, ties.to(torch.int32)).view(torch.bool)
        won |= (counts == half) & coins
    return (won.view(torch.int64) * GATHER >> 56).to(torch.uint8)


def _counted(votes: Tensor, lanes: Tensor) -> Tensor:
    each = lanes.index_select(0, votes.reshape(-1).to(torch.int32)).view(votes.shape)
    return each.sum(dim=0).view(torch.uint8)


@lru_cache(maxsize=16)
def _lanes(device: torch.device) -> Tensor:
    byte = torch.arange(256, dtype=torch.int64, device=device)[:, None]
    bits = byte >> torch.arange(8, dtype=torch.int64, device=device) & 1
    return bits.to(torch.uint8).view(torch.int64).view(-1)
