"""The laws of selectors: each holds for every selector that is registered."""

from __future__ import annotations

import math

import pytest
import torch

from laconic.codecs.selectors.density_schedule import DensitySchedule
from laconic.codecs.selectors.threshold import Threshold
from laconic.codecs.sparse import Sparse
from laconic.core.errors import SpecError
from laconic.core.layout import Segments
from laconic.core.selector import Selector
from laconic.core.spec import parse
from tests.cases import over

from .table import cases, given, listed, same, specs

each = over(spec=specs(Selector))


@each
def test_positions_ascend_inside_and_hold_no_zero(spec: str) -> None:
    select = parse(spec)
    for label, x in cases():
        before = x.clone()
        indices = select.select(x, key=4)
        assert indices.dtype == torch.int32 and indices.numel() <= select.max_count(x.numel()), label
        assert bool((indices[1:] > indices[:-1]).all()), label
        assert not indices.numel() or (int(indices[0]) >= 0 and int(indices[-1]) < x.numel()), label
        assert select.replayable or bool((x[indices.long()] != 0).all()), label
        assert same(x, before), label
        assert same(select.select(x, key=4), indices), label


@each
def test_the_rest_is_within_the_bounds(spec: str) -> None:
    select = parse(spec)
    draws = 100 if select.replayable else 3
    for label, x in cases(sizes=(1, 7, 100, 1001)):
        norm, left = float(x.double().square().sum()), []
        for key in range(draws):
            rest = x.double()
            rest[select.select(x, key=key).long()] = 0
            left.append(float(rest.square().sum()))
        # the rest of a replayable selector is a mean over keys: 5 sigma of a variable in [0, 1]
        slack = 2.5 / math.sqrt(len(left)) if select.replayable else 0.0
        assert sum(left) / len(left) <= (select.omega(x.numel()) + slack) * norm * (1 + 1e-9), label
        absolute = select.absolute_error(x.numel())
        assert absolute is None or max(left) <= absolute * (1 + 1e-9), label


@each
def test_segments_are_selected_as_if_alone(spec: str) -> None:
    select = parse(spec)
    x, segments = given("heavy", 2000), Segments((3, 700, 400, 1990), (350, 1201, 0, 10))
    keys = (5, 6, 7, 8)
    indices, counts = select.select_segments(x, segments, keys)
    assert counts.dtype == torch.int64 and counts.device.type == "cpu"
    parts = torch.split(indices, counts.tolist())
    for view, key, part in zip(segments.views(x), keys, parts, strict=True):
        assert same(select.select(view.clone(), key), part)


@each
def test_a_replayable_choice_follows_from_key_and_size(spec: str) -> None:
    select = parse(spec)
    if not select.replayable:
        assert select.select(torch.zeros(100), key=1).numel() == 0
        return
    a, b = select.select(given("normal", 1001), key=9), select.select(torch.zeros(1001), key=9)
    assert same(a, b) and a.numel() == select.max_count(1001)
    assert not same(a, select.select(torch.zeros(1001), key=10))


def test_randomk_chooses_every_position_alike() -> None:
    """500 draws of 20 in 100: each position 100 times, within 5 sigma of the binomial, 8.9 each."""
    draws = Segments.consecutive([100] * 500)
    indices, _ = parse("randomk(density=0.2)").select_segments(torch.zeros(draws.numel), draws, range(500))
    seen = torch.bincount(indices, minlength=100)
    assert int((seen - 100).abs().max()) <= 5 * math.sqrt(500 * 0.2 * 0.8)


def test_topk_is_what_sorting_gives() -> None:
    x = given("normal", 1001)
    x[10:20] = x[10]  # ties: the lower position first
    order = sorted(range(1001), key=lambda i: (-abs(float(x[i])), i))
    for density in (0.001, 0.01, 0.3, 1.0):
        k = math.ceil(density * 1001 - 1e-9)
        assert parse(f"topk(density={density})").select(x).tolist() == sorted(order[:k])


def test_sampled_topk_keeps_the_largest_and_nearly_as_many_as_asked() -> None:
    x = given("heavy", 65537)
    largest = x.abs().sort(descending=True).values
    for density in (0.001, 0.01, 0.1):
        k = math.ceil(density * 65537 - 1e-9)
        for key in range(5):
            chosen = x[parse(f"sampled_topk(density={density})").select(x, key=key).long()].abs()
            assert math.ceil(0.8 * k - 1e-9) <= chosen.numel() <= k
            assert float(chosen.min()) == float(largest[chosen.numel() - 1])


def test_threshold_compares_in_float32() -> None:
    value = 0.1  # as a float64 it lies below its float32
    x = torch.tensor([0.1, -0.1, 0.09999999])
    assert Threshold(value).select(x).tolist() == [0, 1]


def test_a_ramp_follows_its_schedule_inside_sparse() -> None:
    codec = parse(
        "sparse(density_schedule(topk(density=0.01), densities=(0.5, 0.25), every=10), indices=golomb())"
    )
    densities = [codec.at(step).select.density for step in (0, 9, 10, 19, 20, 1000)]
    assert densities == [0.5, 0.5, 0.25, 0.25, 0.01, 0.01]
    assert codec.at(0).indices == codec.indices
    steady = parse("sparse(topk(density=0.01))")
    assert steady.at(7) is steady
    assert codec.nbytes(1000) >= codec.at(0).nbytes(1000)
    assert codec.omega(1000) == codec.at(1000).omega(1000)


BAD = """
topk(density=0); topk(density=1.5); topk(density=True); topk(density='half'); randomk(density=2)
sampled_topk(density=-0.1); sampled_topk(density=0.1, sample_ratio=0); cast(dtype='fp8'); sparse(dense())
threshold(value=0); threshold(value=-1.0); threshold(value=1e-60); threshold(value=1e60)
density_schedule(topk(density=0.1), densities=(), every=5); threshold(value='big')
density_schedule(topk(density=0.1), densities=(2.0,), every=5)
density_schedule(topk(density=0.1), densities=0.5, every=5)
density_schedule(topk(density=0.1), densities=(0.5,), every=0)
density_schedule(threshold(value=1.0), densities=(0.5,), every=5)
sparse(topk(density=0.1), values=topk(density=0.1)); sparse(topk(density=0.1), indices=dense())
"""


@over(spec=listed(BAD))
def test_bad_arguments_are_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        parse(spec)


def test_lists_from_python_become_tuples() -> None:
    ramp = DensitySchedule(parse("topk(density=0.1)"), [0.5, 0.25], every=5)  # type: ignore[arg-type]
    assert parse(repr(ramp)) == ramp and hash(ramp) == hash(parse(repr(ramp)))


def test_omega_of_sparse_combines_both_losses() -> None:
    """d + w (1 - d): a tenth kept exactly loses 0.9; kept with error w it loses a little more."""
    assert Sparse(parse("topk(density=0.1)")).omega(100) == pytest.approx(0.9)
    halves = Sparse(parse("topk(density=0.1)"), values=parse("cast(dtype='bf16')")).omega(100)
    assert halves == pytest.approx(0.9 + 0.1 * 2**-16)
    assert Sparse(parse("threshold(value=0.5)")).absolute_error(100) == pytest.approx(25.0)
    assert Sparse(parse("topk(density=0.1)")).absolute_error(100) is None
