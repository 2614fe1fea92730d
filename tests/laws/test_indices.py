"""The laws of index codings: each holds for every one that is registered."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic import kernels
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.core.selector import IndexCoding
from laconic.core.spec import parse
from tests.cases import over

from .table import same, specs

SPECS = specs(IndexCoding)
each = over(spec=SPECS)
Chosen = tuple[Tensor, Tensor, Segments]

SHAPES = {  # name: (k, n) of each segment
    "none": (),
    "empty": ((0, 0),),
    "nothing chosen": ((0, 5), (0, 1)),
    "all of one": ((1, 1),),
    "all": ((100, 100),),
    "one of many": ((1, 2**31 - 1),),
    "two of the most": ((2, 2**31),),
    "mixed": ((3, 10), (0, 7), (65, 65), (1, 2), (40, 1001), (0, 0), (700, 65537)),
    "sparse": ((10, 10_000_000), (1000, 1_000_000)),
}


def chosen(shapes: tuple[tuple[int, int], ...], seed: int = 0, clustered: bool = False) -> Chosen:
    """k distinct positions of n for each segment, spread over it or at its very end."""
    rng = torch.Generator().manual_seed(seed)
    parts = [torch.zeros(0, dtype=torch.int64)]
    for k, n in shapes:
        if clustered:
            part = torch.arange(n - k, n)
        elif n <= 1_000_000:
            part = torch.randperm(n, generator=rng)[:k].sort().values
        else:
            part = (torch.arange(k) * (n // max(k, 1))) + int(
                torch.randint(0, n // max(k, 1), (1,), generator=rng)
            )
        parts.append(part)
    counts = torch.tensor([k for k, _ in shapes], dtype=torch.int64)
    return torch.cat(parts).to(torch.int32), counts, Segments.consecutive(n for _, n in shapes)


@over(spec=SPECS, shape=SHAPES, clustered=(False, True))
def test_back_and_forth(spec: str, shape: tuple[tuple[int, int], ...], clustered: bool) -> None:
    coding = parse(spec)
    indices, counts, segments = chosen(shape, clustered=clustered)
    before = indices.clone()
    wire = coding.encode(indices, counts, segments)
    assert wire.dtype == torch.uint8 and wire.dim() == 1 and wire.is_contiguous()
    assert same(coding.decode(wire, counts, segments), indices)
    assert same(indices, before)
    most = sum(coding.nbytes(k, n) for k, n in shape)
    assert wire.numel() <= most


@settings(max_examples=100, deadline=None)
@given(data=st.data(), spec=st.sampled_from(SPECS))
def test_any_set_of_positions(spec: str, data: st.DataObject) -> None:
    coding = parse(spec)
    sizes = data.draw(st.lists(st.integers(0, 300), max_size=5))
    sets = [sorted(data.draw(st.sets(st.integers(0, n - 1)))) if n else [] for n in sizes]
    indices = torch.tensor([i for each in sets for i in each], dtype=torch.int32)
    counts = torch.tensor([len(each) for each in sets], dtype=torch.int64)
    segments = Segments.consecutive(sizes)
    wire = coding.encode(indices, counts, segments)
    assert same(coding.decode(wire, counts, segments), indices)
    assert wire.numel() <= sum(coding.nbytes(len(each), n) for each, n in zip(sets, sizes, strict=True))


@each
def test_fewer_positions_never_take_more_than_the_bound(spec: str) -> None:
    """nbytes(k, n) bounds every count up to k, since a selector may choose fewer than it can."""
    coding = parse(spec)
    for n in (1, 2, 17, 100):
        longest = 0
        for k in range(n + 1):
            for clustered in (False, True):
                indices, counts, segments = chosen(((k, n),), seed=k, clustered=clustered)
                longest = max(longest, coding.encode(indices, counts, segments).numel())
            assert longest <= coding.nbytes(k, n), (k, n)


@each
def test_cut_and_longer_wires_are_refused(spec: str) -> None:
    coding = parse(spec)
    indices, counts, segments = chosen(SHAPES["mixed"])
    wire = coding.encode(indices, counts, segments)
    for bad in (*(wire[:m] for m in range(0, wire.numel(), 7)), wire[:-1]):
        with pytest.raises(WireError):
            coding.decode(bad.clone(), counts, segments)
    for extra in (0, 1, 255):
        with pytest.raises(WireError):
            coding.decode(torch.cat([wire, wire.new_full((1,), extra)]), counts, segments)


@each
def test_what_is_accepted_is_what_an_encoder_makes(spec: str) -> None:
    """A damaged wire is refused, or it is the very wire of the positions that it decodes to."""
    coding = parse(spec)
    rng = torch.Generator().manual_seed(3)
    refused = 0
    for trial in range(150):
        indices, counts, segments = chosen(((5, 40), (0, 3), (30, 64), (2, 5000)), seed=trial)
        bad = coding.encode(indices, counts, segments)
        for _ in range(int(torch.randint(1, 3, (1,), generator=rng))):
            at = int(torch.randint(0, bad.numel(), (1,), generator=rng))
            bad[at] = int(bad[at]) ^ 1 << int(torch.randint(0, 8, (1,), generator=rng))
        try:
            got = coding.decode(bad, counts, segments)
        except WireError:
            refused += 1
            continue
        assert kernels.ascending(got, counts, segments)
        assert same(coding.encode(got, counts, segments), bad)
    assert refused > 0


@each
def test_counts_beyond_their_tensors_are_refused(spec: str) -> None:
    coding = parse(spec)
    wire = torch.zeros(4 * 9, dtype=torch.uint8)
    for counts in ([9, 0], [-1, 10]):
        with pytest.raises(WireError):
            coding.decode(wire, torch.tensor(counts), Segments.consecutive([5, 20]))
