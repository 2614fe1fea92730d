"""Codebooks: groups by rank as plain sorting gives them, the same bytes on every target, refusals."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.logquant import powers_of
from laconic.core.errors import NonFiniteError, WireError
from laconic.core.layout import Segments

ALL = list(kernels.runnable())
BOUNDS, POWERS = powers_of(2.0, 15, 0.5), powers_of(2.0, 15, 0.0)
Encode = Callable[[Tensor, Segments], Tensor]
KINDS: dict[str, tuple[Encode, Callable[[Tensor, Segments, Tensor, float], Tensor]]] = {
    "hierarchy of 1": (
        lambda x, at: kernels.hierarchy_encode(x, at, 1),
        lambda wire, at, out, alpha: kernels.hierarchy_add_(wire, at, out, 1, alpha),
    ),
    "hierarchy of 5": (
        lambda x, at: kernels.hierarchy_encode(x, at, 5),
        lambda wire, at, out, alpha: kernels.hierarchy_add_(wire, at, out, 5, alpha),
    ),
    "quantile of 24": (
        lambda x, at: kernels.quantile_encode(x, at, 24),
        lambda wire, at, out, alpha: kernels.quantile_add_(wire, at, out, 24, alpha),
    ),
    "powers": (
        lambda x, at: kernels.powers_encode(x, at, BOUNDS),
        lambda wire, at, out, alpha: kernels.powers_add_(wire, at, out, POWERS, alpha),
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_target = pytest.mark.parametrize("name", ALL)


def some(seed: int) -> tuple[Tensor, Segments]:
    """Tensors of up to 60 elements, or one of some thousands; ties, zeros of both signs, denormals."""
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 60, (seed % 5,), generator=rng).tolist() + ([5000] if seed % 9 == 0 else [])
    segments = Segments.consecutive(sizes)
    x = torch.randn(segments.end + 3, generator=rng)
    if seed % 3 == 0:
        x = (2 * x).round() / 2
    return x * (1e-41 if seed % 7 == 0 else 1), segments


def floats(wire: Tensor, count: int) -> list[float]:
    return list(struct.unpack(f"<{count}f", bytes(wire[: 4 * count].tolist())))


def single(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


@each_kind
def test_all_targets_write_and_read_the_same(kind: str) -> None:
    encode, add = KINDS[kind]
    for seed in range(60):
        x, segments = some(seed)
        made = []
        for name in ALL:
            with kernels.using(name):
                wire = encode(x, segments)
                made.append((wire, add(wire, segments, torch.ones_like(x), -0.3)))
        for wire, out in made[1:]:
            assert torch.equal(wire, made[0][0]) and torch.equal(out, made[0][1]), seed


@each_target
@pytest.mark.parametrize("levels", [1, 2, 4, 7, 64])
def test_hierarchy_by_hand(name: str, levels: int) -> None:
    for seed in range(0, 40, 3):
        x, _ = some(seed)
        x = x[:50]
        n = x.numel()
        groups = min(levels, n)
        order = sorted(range(n), key=lambda i: (-abs(float(x[i])), i))
        group = {i: rank * groups // n for rank, i in enumerate(order)}
        means = [
            math.fsum(abs(float(x[i])) for i in group if group[i] == g) / sum(group[i] == g for i in group)
            for g in range(groups)
        ]
        with kernels.using(name):
            wire = kernels.hierarchy_encode(x, Segments.whole(n), levels)
            back = kernels.hierarchy_add_(wire, Segments.whole(n), torch.zeros(n), levels)
        assert wire.numel() == 4 * groups + math.ceil(n * (1 + math.ceil(math.log2(groups))) / 8)
        assert floats(wire, groups) == [single(mean) for mean in means]
        assert back.tolist() == [math.copysign(single(means[group[i]]), float(x[i])) for i in range(n)]


@each_target
@pytest.mark.parametrize("bins", [2, 3, 16, 300])
def test_quantile_by_hand(name: str, bins: int) -> None:
    for seed in range(0, 40, 3):
        x, _ = some(seed)
        x = x[:50]
        n = x.numel()
        values, count = x.tolist(), min(bins, n)
        below = [i for i in sorted(range(n), key=lambda i: (values[i], i)) if values[i] < 0]
        above = [i for i in sorted(range(n), key=lambda i: (values[i], i)) if values[i] >= 0]
        share = math.floor(count * len(below) / n + 0.5)
        share = min(max(share, 1), count - 1) if below and above else share
        members: list[list[int]] = [[] for _ in range(count)]
        for part, first, bins_of in ((below, 0, share), (above, share, count - share)):
            for rank, i in enumerate(part):
                members[first + rank * bins_of // len(part)].append(i)
        assert all(members)
        means = [single(math.fsum(values[i] for i in part) / len(part)) for part in members]
        expected = {i: mean for part, mean in zip(members, means, strict=True) for i in part}
        with kernels.using(name):
            wire = kernels.quantile_encode(x, Segments.whole(n), bins)
            back = kernels.quantile_add_(wire, Segments.whole(n), torch.zeros(n), bins)
        assert wire.numel() == 4 * count + math.ceil(n * math.ceil(math.log2(count)) / 8)
        assert floats(wire, count) == means == sorted(means)
        assert back.tolist() == [expected[i] for i in range(n)]


@each_target
def test_powers_are_the_rounded_logarithm(name: str) -> None:
    """Away from the borders, where the logarithm's own rounding decides."""
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)) ** 5
    for base, levels in ((2.0, 15), (1.2, 63), (3.0, 4)):
        bounds, powers = powers_of(base, levels, 0.5), powers_of(base, levels, 0.0)
        with kernels.using(name):
            wire = kernels.powers_encode(x, Segments.whole(2000), bounds)
            back = kernels.powers_add_(wire, Segments.whole(2000), torch.zeros(2000), powers)
        largest = float(x.abs().max())
        for value, got in zip(x.tolist(), back.tolist(), strict=True):
            exact = math.log(largest / abs(value), base)
            if abs(exact % 1 - 0.5) > 1e-4:
                q = round(exact)
                expected = math.copysign(largest * base**-q, value) if q < levels else 0.0
                assert got == pytest.approx(expected, rel=3e-7)


@each_target
@each_kind
def test_what_is_not_finite_is_refused(kind: str, name: str) -> None:
    encode, _ = KINDS[kind]
    with kernels.using(name):
        for bad in (math.nan, math.inf, -math.inf):
            x = torch.ones(100)
            x[57] = bad
            with pytest.raises(NonFiniteError, match="NaN or Inf"):
                encode(x, Segments((0, 50), (50, 50)))
            assert encode(x, Segments((0, 60), (50, 40))).numel() > 0  # nobody asked for that entry


@each_target
def test_decoders_refuse_what_no_encoder_makes(name: str) -> None:
    whole = Segments.whole(3)

    def refused(kind: str, book: list[float], *codes: int) -> None:
        wire = torch.tensor([*struct.pack(f"<{len(book)}f", *book), *codes], dtype=torch.uint8)
        with pytest.raises(WireError):
            KINDS[kind][1](wire, whole, torch.zeros(3), 1.0)

    with kernels.using(name):
        for bad in (math.nan, math.inf, -1.0):
            refused("hierarchy of 1", [bad], 0)
            refused("hierarchy of 5", [1.0, bad, 0.5], 0, 0)
            refused("powers", [bad], 0, 0)
        refused("quantile of 24", [0.0, math.inf, 1.0], 0)
        refused("hierarchy of 1", [1.0], 0b1000)  # three signs, and a bit behind them
        refused("hierarchy of 5", [1.0, 0.5, 0.25], 0b011, 0)  # group 3 of 3
        refused("hierarchy of 5", [1.0, 0.5, 0.25], 0, 0b10)  # nine bits are in use
        refused("quantile of 24", [0.0, 1.0, 2.0], 0b11)
        refused("quantile of 24", [0.0, 1.0, 2.0], 0b01000000)
        refused("powers", [1.0], 0b10000, 0)  # a sign without a level
        refused("powers", [1.0], 0, 0b10000000)
        refused("powers", [1.0], 0, 0, 0)
        refused("powers", [1.0], 0)
