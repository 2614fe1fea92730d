"""Accumulation: the same bits everywhere, nothing outside the segments, nothing that is not finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.layout import Segments

ALL = list(kernels.runnable())
SEGMENTS = [
    Segments.whole(0),
    Segments.whole(10_007),
    Segments((5, 1, 7, 200), (2, 3, 65, 1000)),
    Segments.consecutive([1, 0, 31, 32, 33, 8191, 8193]),
]
NAN, INF = float("nan"), float("inf")


def inputs(segments: Segments, count: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(segments.numel)
    return [torch.randn(segments.end + 9, generator=rng) for _ in range(count)]


def outside(segments: Segments, n: int) -> Tensor:
    mask = torch.ones(n, dtype=torch.bool)
    for view in segments.views(mask):
        view.fill_(False)
    return mask


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("segments", SEGMENTS, ids=lambda s: f"{s.numel}in{len(s)}")
@pytest.mark.parametrize(("scale", "decay"), [(1.0, 1.0), (1 / 3, 0.9), (65536.0, 0.1)])
def test_accumulate_is_decay_and_add(name: str, segments: Segments, scale: float, decay: float) -> None:
    residual, grad = inputs(segments, 2)
    before = residual.clone()
    with kernels.using(name):
        assert kernels.accumulate_(residual, grad, segments, scale, decay)
    expected = before * torch.tensor(decay) + grad * torch.tensor(scale)
    apart = outside(segments, residual.numel())
    assert torch.equal(residual[apart], before[apart])
    assert torch.equal(residual[~apart], expected[~apart])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("segments", SEGMENTS, ids=lambda s: f"{s.numel}in{len(s)}")
@pytest.mark.parametrize("nesterov", [False, True])
def test_velocity_is_momentum_correction(name: str, segments: Segments, nesterov: bool) -> None:
    u, v, g = inputs(segments, 3)
    momentum = torch.linspace(0.5, 0.99, len(segments))
    m, g3 = torch.zeros_like(u), g * torch.tensor(1 / 3)
    for view, value in zip(segments.views(m), momentum, strict=True):
        view.fill_(value)
    new_u = (u + g3) * m if nesterov else u * m + g3
    new_v = v + new_u + g3 if nesterov else v + new_u
    got_u, got_v = u.clone(), v.clone()
    with kernels.using(name):
        assert kernels.velocity_(got_u, got_v, g, segments, momentum, 1 / 3, nesterov)
    apart = outside(segments, u.numel())
    assert torch.equal(got_u, torch.where(apart, u, new_u))
    assert torch.equal(got_v, torch.where(apart, v, new_v))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("at", [0, 15, 16, 31, 999])
def test_what_is_not_finite_is_not_written(name: str, bad: float, at: int) -> None:
    """3e38 is finite itself, but 3e38 + 3e38 is not."""
    whole = Segments.whole(1000)
    with kernels.using(name):
        for nesterov in (None, False, True):
            residual, velocity, grad = torch.full((1000,), 1.0), torch.full((1000,), 2.0), torch.ones(1000)
            residual[at], grad[at] = 3e38, bad
            if nesterov is None:
                clean = kernels.accumulate_(residual, grad, whole)
            else:
                clean = kernels.velocity_(velocity, residual, grad, whole, torch.ones(1), 1.0, nesterov)
                assert velocity[at] == 2.0
                assert velocity[at - 1] == 3.0
            assert not clean
            assert residual[at] == torch.tensor(3e38)
            assert residual[at - 1] > 1
            assert torch.isfinite(residual).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_all_finite_sees_one_entry_and_only_in_its_segments(name: str, bad: float) -> None:
    x, segments = torch.ones(20_000), Segments((10, 9_000), (30, 10_000))
    with kernels.using(name):
        for at in (10, 39, 9_000, 17_191, 18_999):
            x[at] = bad
            assert not kernels.all_finite(x, segments)
            x[at] = 3e38
            assert kernels.all_finite(x, segments)
        x[9] = x[40] = x[19_000] = bad
        assert kernels.all_finite(x, segments)


def test_bad_arguments_are_named() -> None:
    x, whole = torch.ones(4), Segments.whole(4)
    with pytest.raises(ValueError, match="grad has 3 elements, but its segments end at 4"):
        kernels.accumulate_(x, torch.ones(3), whole)
    with pytest.raises(ValueError, match=r"residual must be a contiguous torch\.float32 vector"):
        kernels.accumulate_(torch.ones(8)[::2], x, whole)
    with pytest.raises(ValueError, match="momentum must be a CPU tensor with one value a segment"):
        kernels.velocity_(x, x.clone(), x.clone(), whole, torch.ones(2))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 1023, 1024, 1025, 10_007])
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_add_sparse_adds_where_there_is_something(name: str, n: int, share: float) -> None:
    rng = torch.Generator().manual_seed(n)
    x, y = torch.randn(n, generator=rng), torch.randn(n, generator=rng)
    y[torch.rand(n, generator=rng) >= share] = -0.0
    x[::3] = -0.0
    expected = torch.where(y == 0, x, x + y * torch.tensor(-1 / 3))
    with kernels.using(name):
        same = kernels.add_sparse_(x, y, -1 / 3)
    assert same is x
    assert torch.equal(x.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("name", ALL)
def test_add_sparse_passes_on_what_is_not_finite(name: str) -> None:
    x, y = torch.zeros(40), torch.zeros(40)
    y[3], y[20], y[39] = NAN, INF, -INF
    with kernels.using(name):
        kernels.add_sparse_(x, y)
    assert torch.equal(x.nan_to_num(), y.nan_to_num())
    assert x[3].isnan()


def test_add_sparse_wants_equal_lengths() -> None:
    with pytest.raises(ValueError, match="equally long, got 3 and 4"):
        kernels.add_sparse_(torch.zeros(3), torch.zeros(4))
