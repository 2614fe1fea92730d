"""The min-max sketch: the paper's property, its tables by hand, and what its wire refuses."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tests.unit.shared import for_each, refuses
from torch import Tensor

from laconic import kernels
from laconic.codecs.minmax_sketch import MinmaxSketch, places
from laconic.codecs.quantile import Quantile
from laconic.core.errors import NonFiniteError, SpecError, WireError
from laconic.core.spec import parse
from laconic.core.turn import mix
from laconic.exchange.method import lift
from laconic.kernels.sketch import ROW

from ..laws.table import cases

SHAPES = [kernels.SketchShape(4, 2, 30, 16), kernels.SketchShape(1, 1, 7, 5), kernels.SketchShape(3, 5, 1, 2)]
EVERY = [
    {"bins": 256, "groups": 16},
    {"bins": 24, "groups": 6, "rows": 1, "share": 0.9},
    {"bins": 16, "groups": 2, "rows": 3, "share": 0.1},
]


def some(shape: kernels.SketchShape, n: int = 400) -> tuple[Tensor, Tensor]:
    """Bins and groups int64 (n,)."""
    rng = torch.Generator().manual_seed(n)
    return torch.randint(shape.width, (n,), generator=rng), torch.randint(shape.groups, (n,), generator=rng)


@for_each("shape", SHAPES)
def test_tables_are_those_of_plain_loops(shape: kernels.SketchShape) -> None:
    bins, groups = some(shape)
    table, places_of = {}, []
    for i, (own, group) in enumerate(zip(bins.tolist(), groups.tolist(), strict=True)):
        words = [int(kernels.philox(mix(ROW, row), 1, i)) % 2**32 for row in range(shape.rows)]
        places_of.append([(group, row, word * shape.columns >> 32) for row, word in enumerate(words)])
        for cell in places_of[-1]:
            table[cell] = min(own, table.get(cell, own))
    held = kernels.sketch_insert(bins, groups, shape)
    stored = held.view(shape.groups, shape.rows, shape.columns)
    assert all(int(stored[cell]) == least for cell, least in table.items())
    assert int((stored != shape.width - 1).sum()) <= len(table)
    read = [max(table[cell] for cell in cells) for cells in places_of]
    assert kernels.sketch_query(held, groups, shape).tolist() == read


def read_back(bins: Tensor, groups: Tensor, shape: kernels.SketchShape) -> Tensor:
    return kernels.sketch_query(kernels.sketch_insert(bins, groups, shape), groups, shape)


def test_no_bin_is_read_further_from_zero_than_it_was_put() -> None:
    """And as many as the README says are read back as they were."""
    for shape in SHAPES:
        bins, groups = some(shape, 2000)
        read = read_back(bins, groups, shape)
        assert bool((read <= bins).all()) and bool((read < bins).any()), shape
    shape = kernels.SketchShape(groups=1, rows=2, columns=30_000, width=4096)
    bins, groups = torch.arange(100_000) % 4096, torch.zeros(100_000, dtype=torch.int64)
    assert float((read_back(bins, groups, shape) == bins).float().mean()) == pytest.approx(0.43, abs=0.01)


@for_each("options", EVERY)
def test_no_value_grows_and_none_changes_its_sign(options: dict[str, int]) -> None:
    """The paper's property; where a bin is its mean, for the bin in place of the value."""
    least, mean = MinmaxSketch(**options, value="least"), MinmaxSketch(**options)  # type: ignore[arg-type]
    for label, x in cases():
        back = least.decode(least.encode(x), x.numel())
        assert bool((back.abs() <= x.abs()).all()), label
        for decoded in (back, mean.decode(mean.encode(x), x.numel())):
            assert not (torch.sign(decoded) * torch.sign(x) < 0).any(), label


@for_each("n", [5, 257, 1001])
@for_each("below", [0.0, 0.01, 0.5, 1.0])
def test_places_are_ranks_by_hand(n: int, below: float) -> None:
    """Of each sign's groups and each group's bins: equal counts, in order, closest to zero first."""
    x = torch.rand(n, generator=torch.Generator().manual_seed(n)) - below
    groups, width = 4, 8
    group, bins = places(x, groups, width)
    of_groups = [x[group == g] for g in range(groups)]
    assert all(len(part) <= -(-2 * n // groups) for part in of_groups)
    filled = [part for part in of_groups if len(part)]
    assert all(bool(a.max() <= b.min()) for a, b in pairwise(filled))
    for g, part in enumerate(of_groups):
        assert bool((part < 0).all()) or bool((part >= 0).all())
        size, far = len(part), part.abs().argsort(stable=True)
        if len(part.unique()) == size:
            assert bins[group == g][far].tolist() == [rank * width // size for rank in range(size)]


def test_up_to_as_many_elements_as_bins_arrive_as_they_are() -> None:
    x = torch.randn(256, generator=torch.Generator().manual_seed(0))
    for codec in (MinmaxSketch(), MinmaxSketch(value="least")):
        assert torch.equal(codec.decode(codec.encode(x), 256), x)
        assert torch.equal(codec.encode(x), Quantile().encode(x))


def test_a_bin_that_is_a_mean_has_the_least_error_that_these_tables_can_have() -> None:
    """No other value in place of a bin's would have less: errors of each decoded value add to zero."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1)).double()
    codec = MinmaxSketch(bins=64, groups=8)
    back = codec.decode(codec.encode(x.float()), 5000).double()
    for value in back.unique():
        assert float((x - back)[back == value].mean()) == pytest.approx(0.0, abs=1e-6)
    assert float((x - back).square().sum() / x.square().sum()) < codec.omega(5000)


def test_the_largest_loss_is_of_a_spike_among_small_ones() -> None:
    """One large value that shares its cells with small ones goes down to them: nearly all is lost."""
    x = torch.full((400,), 1e-3)
    x[7] = 1.0
    codec = MinmaxSketch(bins=4, groups=2, share=0.01, value="least")
    lost = float((codec.decode(codec.encode(x), 400) - x).square().sum() / x.square().sum())
    assert 0.99 < lost <= codec.omega(400) == 1


def test_what_no_encoder_makes_is_refused() -> None:
    codec = MinmaxSketch(bins=12, groups=3, share=0.4)  # 2 bits a group, of 4; 2 a cell; 4 bins a group
    wire = codec.encode(torch.randn(101, generator=torch.Generator().manual_seed(2)))
    group, last = 4 * 12, wire.numel() - 1
    for place, byte, said in (
        (group, 0xFF, "a group or a bin is not in the codebook"),
        (group + 25, 0x41, "must be zero"),  # 101 groups end in the middle of a byte
        (3, 0x7F, "NaN or Inf"),
    ):
        bad = wire.clone()
        bad[place] = byte
        if place == 3:
            bad[2] = 0xFF
        out = torch.ones(101)
        refuses(WireError, said, codec.decode_add_, bad, out)
        assert bool((out == 1).all())
    odd = MinmaxSketch(bins=15, groups=3)  # five bins a group in three bits
    bad = odd.encode(torch.randn(101, generator=torch.Generator().manual_seed(2)))
    bad[4 * 15 + 26] = 0xFF
    refuses(WireError, "a group or a bin is not in the codebook", odd.decode, bad, 101)
    refuses(WireError, rf"a wire of {last + 1} bytes is expected, got {last}", codec.decode, wire[:last], 101)
    refuses(NonFiniteError, "NaN or Inf", codec.encode, torch.full((101,), torch.nan))


def test_what_the_codec_and_the_method_refuse() -> None:
    for spec, message in (
        ("minmax_sketch(bins=3)", "bins must be a whole number in 4..65536, got 3"),
        ("minmax_sketch(groups=1)", "groups must be a whole number in 2..128, got 1"),
        ("minmax_sketch(bins=256, groups=24)", "groups must divide bins, got 24 of 256"),
        ("minmax_sketch(rows=0)", "rows must be a whole number in 1..16, got 0"),
        ("minmax_sketch(rows=4)", r"share must be a number in \(0, 0.25\), got 0.3; .*use quantile"),
        ("minmax_sketch(value='midpoint')", "value must be 'mean' or 'least', got 'midpoint'"),
        ("sketchml(groups=7)", "groups must divide bins, got 7 of 256"),
    ):
        refuses(SpecError, message, parse, spec)
    spec = "sketchml(density=0.05, bins=64, groups=8)"
    assert repr(parse(spec)) == spec
    values = [lift(text).routes[0].reducer.feedback_codec().values for text in (spec, "sketchml()")]  # type: ignore[union-attr]
    assert values == [MinmaxSketch(bins=64, groups=8), Quantile()]
