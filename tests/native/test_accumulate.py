"""Accumulation and chosen entries: the same bits everywhere, and nothing outside the segments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.layout import Segments
from tests.cases import over

from .targets import BUFFERS, INF, NAN, agree, normal, outside, refused, spoilt


@over(segments=BUFFERS, scale_decay=((1.0, 1.0), (1 / 3, 0.9), (65536.0, 0.1)), keep=(False, True))
def test_accumulate_is_decay_and_add(
    segments: Segments, scale_decay: tuple[float, float], keep: bool
) -> None:
    residual, grad, (scale, decay) = normal(segments.end + 9), normal(segments.end + 9, 1), scale_decay

    def accumulated() -> tuple[bool, Tensor, Tensor]:
        out, given = residual.clone(), grad.clone()
        return kernels.accumulate_(out, given, segments, scale, decay, keep), out, given

    clean, got, kept = agree(accumulated)
    expected = residual * torch.tensor(decay) + grad * torch.tensor(scale)
    apart = outside(segments, len(got))
    assert clean and torch.equal(got, torch.where(apart, residual, expected))
    assert torch.equal(kept, torch.where(apart, grad, residual) if keep else grad)


FORMS = {"plain": (False, 0.0), "nesterov": (True, 0.0), "ahead": (False, 1.0), "both": (True, 0.3)}


@over(segments=BUFFERS, form=FORMS, in_place=(False, True))
def test_velocity_is_momentum_correction(
    segments: Segments, form: tuple[bool, float], in_place: bool
) -> None:
    nesterov, ahead = form
    u, v, g = (normal(segments.end + 9, seed) for seed in range(3))
    v[::3] = 0  # not waiting
    momentum = torch.linspace(0.5, 1.0, len(segments))
    momentum[-2:] = torch.tensor([0.98, torch.tensor(0.98).nextafter(torch.tensor(1.0))])[: len(segments)]

    def corrected() -> tuple[bool, Tensor, Tensor, Tensor, Tensor]:
        got, residual, given = u.clone(), v.clone(), g.clone()
        fresh = residual if in_place else v.clone()
        clean = kernels.velocity_(got, residual, given, fresh, segments, momentum, 1 / 3, nesterov, ahead)
        return clean, got, residual, given, fresh

    m, g3, apart = torch.zeros_like(u), g * torch.tensor(1 / 3), outside(segments, len(u))
    for view, value in zip(segments.views(m), momentum, strict=True):
        view.fill_(value)
    new_u = (u + g3) * m if nesterov else u * m + g3
    new_v = v + new_u + g3 if nesterov else v + new_u
    waits = v.abs() > new_u.abs() / 4
    waits &= m <= 0.98
    new_v = torch.where(waits, new_v + new_u * (ahead * m / (1 - m)), new_v)
    new_u = torch.where(waits, new_u * (1 - ahead), new_u)
    clean, got_u, got_v, kept, fresh = agree(corrected)
    assert clean
    assert torch.equal(got_u, torch.where(apart, u, new_u))
    assert torch.equal(fresh, torch.where(apart, v, new_v))
    assert torch.equal(got_v, fresh if in_place else v)
    assert torch.equal(kept, torch.where(apart, g, u)), "the old velocity"


@over(bad=(NAN, INF, -INF, 3e38), at=(0, 15, 16, 31, 999), nesterov=(None, False, True))
def test_nan_and_inf_are_not_written_and_the_rest_is_undone(
    bad: float, at: int, nesterov: bool | None
) -> None:
    """3e38 is finite itself, but 3e38 + 3e38 is not."""
    whole, old = Segments.whole(1000), (spoilt(1000, at, 3e38), torch.full((1000,), 2.0))

    def accumulated() -> tuple[bool, Tensor, Tensor, Tensor]:
        (residual, velocity), grad = (each.clone() for each in old), spoilt(1000, at, bad)
        if nesterov is None:
            return kernels.accumulate_(residual, grad, whole, keep=True), residual, velocity, grad
        clean = kernels.velocity_(
            velocity, residual, grad, residual, whole, torch.full((1,), 0.9), 1.0, nesterov, 0.5
        )
        return clean, residual, velocity, grad

    clean, residual, velocity, kept = agree(accumulated)
    assert not clean and residual[at] == torch.tensor(3e38) and torch.isfinite(residual).all()
    assert residual[at - 1] > 1 and bool(kept[at].isinf()), "so that its tensor can be named"
    assert nesterov is None or (velocity[at] == 2.0 and velocity[at - 1] < 1.5)
    changed, before = (residual, old[0]) if nesterov is None else (velocity, old[1])
    kernels.undo_(changed, kept, whole)
    assert torch.equal(changed, before)


@over(bad=(NAN, INF, -INF))
def test_all_finite_sees_one_entry_and_only_in_its_segments(bad: float) -> None:
    x, segments = torch.ones(20_000), Segments((10, 9_000), (30, 10_000))
    for at in (10, 39, 9_000, 17_191, 18_999):
        x[at] = bad
        assert not agree(lambda: kernels.all_finite(x, segments))
        x[at] = 3e38
        assert agree(lambda: kernels.all_finite(x, segments))
    x[9] = x[40] = x[19_000] = bad
    assert agree(lambda: kernels.all_finite(x, segments))


@over(n=(0, 1, 15, 16, 17, 1023, 1024, 1025, 10_007), share=(0.0, 0.01, 1.0))
def test_add_sparse_adds_where_there_is_something(n: int, share: float) -> None:
    x, y, drawn = normal(n), normal(n, 1), torch.rand(n, generator=torch.Generator().manual_seed(n))
    y[drawn >= share] = -0.0
    x[::3] = -0.0
    got = agree(lambda: kernels.add_sparse_(x.clone(), y, -1 / 3))
    expected = torch.where(y == 0, x, x + y * torch.tensor(-1 / 3))
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
    assert kernels.add_sparse_(x, y) is x


def test_add_sparse_passes_on_nan_and_inf() -> None:
    y = torch.zeros(40)
    y[3], y[20], y[39] = NAN, INF, -INF
    x = agree(lambda: kernels.add_sparse_(torch.zeros(40), y))
    assert torch.equal(x.nan_to_num(), y.nan_to_num()) and x[3].isnan()


SEGMENTS, COUNTS = Segments((100, 3, 50, 60), (900, 40, 0, 33)), torch.tensor([300, 7, 0, 33])
X, VALUES = normal(1000), normal(340, 1)


def chosen() -> tuple[Tensor, Tensor]:
    """Return ascending positions in their segments, and the same positions in the buffer."""
    rng = torch.Generator().manual_seed(0)
    parts = [
        torch.randperm(n, generator=rng)[:k].sort().values
        for n, k in zip(SEGMENTS.sizes, COUNTS.tolist(), strict=True)
    ]
    indices = torch.cat(parts)
    return indices.int(), indices + torch.repeat_interleave(SEGMENTS.starts_tensor, COUNTS)


def test_gather_and_scatter_reach_the_chosen_entries_and_no_other() -> None:
    indices, flat = chosen()
    assert torch.equal(agree(lambda: kernels.gather(X, SEGMENTS, indices, COUNTS)), X[flat])
    for alpha in (1.0, -1.0, 1 / 3):
        got = agree(lambda a=alpha: kernels.scatter_add_(X.clone(), SEGMENTS, indices, COUNTS, VALUES, a))
        assert torch.equal(got, X.index_add(0, flat, VALUES * torch.tensor(alpha)))
    got = agree(lambda: kernels.scatter_zero_(X.clone(), SEGMENTS, indices, COUNTS))
    assert torch.equal(got, X.index_fill(0, flat, 0))
    out = X.clone()
    assert kernels.scatter_zero_(out, SEGMENTS, indices, COUNTS) is out
    assert kernels.scatter_add_(out, SEGMENTS, indices, COUNTS, VALUES) is out


@over(place_index=((0, -1), (299, 900), (300, 40), (339, 33), (339, 2**31 - 1), (5, -(2**31))))
def test_an_index_out_of_its_segment_stops_every_write(place_index: tuple[int, int]) -> None:
    x, (indices, _), (place, index) = X.clone(), chosen(), place_index
    indices[place] = index
    refused(
        "outside its tensor",
        lambda: kernels.gather(x, SEGMENTS, indices, COUNTS),
        lambda: kernels.scatter_add_(x, SEGMENTS, indices, COUNTS, torch.ones(340)),
        lambda: kernels.scatter_zero_(x, SEGMENTS, indices, COUNTS),
    )
    assert torch.equal(x, X)


def test_counts_that_do_not_fit_are_refused() -> None:
    indices, far = chosen()[0], torch.tensor([2**62, 2**62, 2**62, 2**62 + 340])
    plus, minus = COUNTS + torch.tensor([1, 0, 0, 0]), COUNTS + torch.tensor([1, 0, -1, 0])
    limits = "from 0 to the 340 indices, got"
    refused("counts add up to 341", lambda: kernels.gather(X, SEGMENTS, indices, plus))
    refused(f"{limits} -1", lambda: kernels.scatter_zero_(X, SEGMENTS, indices, minus))
    refused(f"{limits} 4611686018427387904", lambda: kernels.gather(X, SEGMENTS, indices, far))
    short = torch.ones(3)
    refused("340 indices.* 3 values", lambda: kernels.scatter_add_(X, SEGMENTS, indices, COUNTS, short))


def test_bad_arguments_are_named() -> None:
    x, whole = torch.ones(4), Segments.whole(4)
    for match, call in (
        ("grad has 3 elements, but its segments end at 4", lambda: kernels.accumulate_(x, x[:3], whole)),
        (
            r"residual must be a contiguous torch\.float32 vector",
            lambda: kernels.accumulate_(torch.ones(8)[::2], x, whole),
        ),
        (
            "one value a segment",
            lambda: kernels.velocity_(x, x.clone(), x.clone(), x.clone(), whole, torch.ones(2)),
        ),
        ("equally long, got 3 and 4", lambda: kernels.add_sparse_(torch.zeros(3), torch.zeros(4))),
    ):
        with pytest.raises(ValueError, match=match):
            call()
