"""Regions of a bucket: one a rank, each with about as many of the entries that ranks have chosen."""

from __future__ import annotations

import pytest
import torch
from tests.laws.worlds import everywhere

from laconic.core.layout import Segments
from laconic.reducers.oktopk.regions import Regions


@pytest.mark.parametrize("size", [1, 3, 64])
def test_regions_share_what_was_chosen(size):
    """All positions once, in pieces that cross no tensor; of equal choices, equal parts but for one entry."""
    tensors = Segments.consecutive([700, 0, 20, 300])
    chosen = torch.randperm(1020, generator=torch.Generator().manual_seed(0))[:256].sort().values
    regions = everywhere(size, lambda comm: Regions.agreed(chosen, tensors, comm, torch.device("cpu")))
    assert all(each == regions[0] for each in regions)
    pieces = [piece for each in regions[0].pieces for piece in each.sizes]
    assert len(regions[0].pieces) == size and sum(pieces) == 1020 and min(pieces) > 0
    sizes = torch.zeros(4, dtype=torch.int64).index_add_(0, regions[0].tensor_of, torch.tensor(pieces))
    assert sizes.tolist() == [700, 0, 20, 300]
    parts = regions[0].split(chosen, chosen.to(torch.float32))
    held = [part.indices.numel() for part in parts]
    assert max(held) - min(held) <= 1
    positions, counts, values = regions[0].join(parts)
    assert torch.equal(positions, chosen) and torch.equal(values, chosen.to(torch.float32))
    assert regions[0].per_tensor(counts).sum() == 256


def test_nothing_chosen_anywhere_is_cut_evenly():
    tensors, nothing = Segments.consecutive([10]), torch.empty(0, dtype=torch.int64)
    regions = everywhere(4, lambda comm: Regions.agreed(nothing, tensors, comm, torch.device("cpu")))
    assert [each.cuts for each in regions] == [(0, 2, 5, 7, 10)] * 4
