"""Majorities, counted bit by bit."""

from __future__ import annotations

import pytest
import torch

from laconic import kernels
from tests.cases import over

from .targets import agree


@over(voters=(1, 2, 3, 4, 5, 8, 15, 16, 33), m=(0, 1, 7, 511, 512, 1030))
def test_more_than_half_win_and_ties_are_drawn(voters: int, m: int) -> None:
    rng = torch.Generator().manual_seed(voters)
    votes = torch.randint(0, 256, (voters, m), generator=rng).to(torch.uint8)
    ties = torch.randint(0, 256, (m,), generator=rng).to(torch.uint8)
    winners = agree(lambda: kernels.majority(votes, ties))
    for place in range(8):
        ones = (votes >> place & 1).sum(dim=0)
        expected = torch.where(2 * ones == voters, ties >> place & 1, (2 * ones > voters).to(torch.uint8))
        assert torch.equal(winners >> place & 1, expected)


@over(voters=(2, 3, 64, 101))
def test_unanimity_and_one_vote_less(voters: int) -> None:
    votes, drawn = torch.zeros(voters, 100, dtype=torch.uint8), torch.arange(100).to(torch.uint8)
    votes[: voters // 2 + 1] = 255
    assert bool((agree(lambda: kernels.majority(votes, torch.zeros_like(drawn))) == 255).all())
    votes[0] = 0
    expected = drawn if voters % 2 == 0 else torch.zeros_like(drawn)
    assert torch.equal(agree(lambda: kernels.majority(votes, drawn)), expected)


def test_votes_and_ties_must_fit() -> None:
    ties = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="at least one voter"):
        kernels.majority(torch.zeros(0, 3, dtype=torch.uint8), ties)
    with pytest.raises(ValueError, match=r"2 voters of 4 bytes need .* 4 bytes of ties"):
        kernels.majority(torch.zeros(2, 4, dtype=torch.uint8), ties)
    with pytest.raises(ValueError, match="uint8"):
        kernels.majority(torch.zeros(2, 3), ties)
