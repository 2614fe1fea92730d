"""Chosen entries: read, added to and cleared; never a write for an index that is out of range."""

from __future__ import annotations

import pytest
import torch

from laconic import kernels
from laconic.core.errors import WireError
from laconic.core.layout import Segments

ALL = list(kernels.runnable())
SEGMENTS = Segments((100, 3, 50, 60), (900, 40, 0, 33))
COUNTS = torch.tensor([300, 7, 0, 33])


def chosen() -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    parts = [
        torch.randperm(n, generator=rng)[:k].sort().values
        for (_, n), k in zip(SEGMENTS, COUNTS.tolist(), strict=True)
    ]
    return torch.cat(parts).int()


def flat_positions(indices: torch.Tensor) -> torch.Tensor:
    return indices.long() + torch.repeat_interleave(SEGMENTS.starts_tensor, COUNTS)


@pytest.mark.parametrize("name", ALL)
def test_gather_reads_the_chosen_entries(name: str) -> None:
    x, indices = torch.randn(1000), chosen()
    with kernels.using(name):
        assert torch.equal(kernels.gather(x, SEGMENTS, indices, COUNTS), x[flat_positions(indices)])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("alpha", [1.0, -1.0, 1 / 3])
def test_scatter_add_adds_there_and_nowhere_else(name: str, alpha: float) -> None:
    x, values, indices = torch.randn(1000), torch.randn(340), chosen()
    expected = x.clone()
    expected[flat_positions(indices)] += values * torch.tensor(alpha)
    with kernels.using(name):
        assert kernels.scatter_add_(x, SEGMENTS, indices, COUNTS, values, alpha) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("name", ALL)
def test_scatter_zero_clears_there_and_nowhere_else(name: str) -> None:
    x, indices = torch.randn(1000), chosen()
    expected = x.clone()
    expected[flat_positions(indices)] = 0
    with kernels.using(name):
        assert kernels.scatter_zero_(x, SEGMENTS, indices, COUNTS) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("place", "index"), [(0, -1), (299, 900), (300, 40), (339, 33), (339, 2**31 - 1), (5, -(2**31))]
)
def test_an_index_out_of_its_segment_stops_every_write(name: str, place: int, index: int) -> None:
    x, indices = torch.randn(1000), chosen()
    before = x.clone()
    indices[place] = index
    with kernels.using(name):
        with pytest.raises(WireError, match="outside its tensor"):
            kernels.gather(x, SEGMENTS, indices, COUNTS)
        with pytest.raises(WireError, match="outside its tensor"):
            kernels.scatter_add_(x, SEGMENTS, indices, COUNTS, torch.ones(340))
        with pytest.raises(WireError, match="outside its tensor"):
            kernels.scatter_zero_(x, SEGMENTS, indices, COUNTS)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ALL)
def test_counts_that_do_not_fit_are_refused(name: str) -> None:
    x, indices = torch.randn(1000), chosen()
    with kernels.using(name):
        with pytest.raises(WireError, match="counts add up to 341"):
            kernels.gather(x, SEGMENTS, indices, COUNTS + torch.tensor([1, 0, 0, 0]))
        with pytest.raises(WireError, match="from 0 to the 340 indices, got -1"):
            kernels.scatter_zero_(x, SEGMENTS, indices, COUNTS + torch.tensor([1, 0, -1, 0]))
        with pytest.raises(WireError, match="340 indices came with 3 values"):
            kernels.scatter_add_(x, SEGMENTS, indices, COUNTS, torch.ones(3))
        with pytest.raises(WireError, match="from 0 to the 340 indices, got 4611686018427387904"):
            kernels.gather(x, SEGMENTS, indices, torch.tensor([2**62, 2**62, 2**62, 2**62 + 340]))
