"""Codebooks: groups by rank as plain sorting gives them, the same bytes on every target, refusals."""

from __future__ import annotations

import math
import struct
from functools import partial

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.logquant import powers_of
from laconic.core.errors import NonFiniteError
from laconic.core.layout import Segments
from tests.cases import over

from .targets import INF, NAN, agree, bytes_of, refused, spoilt, wire_of

BOUNDS, POWERS = powers_of(2.0, 15, 0.5), powers_of(2.0, 15, 0.0)
KINDS = {
    "hierarchy of 1": (kernels.hierarchy_encode, kernels.hierarchy_add_, 1, 1),
    "hierarchy of 5": (kernels.hierarchy_encode, kernels.hierarchy_add_, 5, 5),
    "quantile of 24": (kernels.quantile_encode, kernels.quantile_add_, 24, 24),
    "powers": (kernels.powers_encode, kernels.powers_add_, BOUNDS, POWERS),
}


def some(seed: int) -> tuple[Tensor, Segments]:
    """Tensors of up to 60 elements, or one of some thousands; ties, zeros of both signs, denormals."""
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 60, (seed % 5,), generator=rng).tolist() + ([5000] if seed % 9 == 0 else [])
    segments = Segments.consecutive(sizes)
    if seed % 2:  # apart, and the last first
        starts = [start + 2 * i for i, start in enumerate(segments.starts)]
        segments = Segments(tuple(reversed(starts)), tuple(reversed(sizes)))
    x = torch.randn(segments.end + 3, generator=rng)
    if seed % 3 == 0:
        x = (2 * x).round() / 2
    return x * (1e-41 if seed % 7 == 0 else 1), segments


def floats(wire: Tensor, count: int) -> list[float]:
    return list(struct.unpack(f"<{count}f", bytes(wire[: 4 * count].tolist())))


def single(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


@over(kind=KINDS, seed=range(60))
def test_all_targets_write_and_read_the_same(kind: tuple, seed: int) -> None:
    (encode, add, book, values), (x, segments) = kind, some(seed)
    wire = agree(lambda: encode(x, segments, book))
    agree(lambda: add(wire, segments, torch.ones_like(x), values, -0.3))


@over(levels=(1, 2, 4, 7, 64), seed=range(0, 40, 3))
def test_hierarchy_by_hand(levels: int, seed: int) -> None:
    x = some(seed)[0][:50]
    n = x.numel()
    groups, whole = min(levels, n), Segments.whole(n)
    order = sorted(range(n), key=lambda i: (-abs(float(x[i])), i))
    group = {i: rank * groups // n for rank, i in enumerate(order)}
    means = [
        math.fsum(abs(float(x[i])) for i in group if group[i] == g) / sum(group[i] == g for i in group)
        for g in range(groups)
    ]
    wire = agree(lambda: kernels.hierarchy_encode(x, whole, levels))
    back = agree(lambda: kernels.hierarchy_add_(wire, whole, torch.zeros(n), levels))
    assert wire.numel() == 4 * groups + math.ceil(n * (1 + math.ceil(math.log2(groups))) / 8)
    assert floats(wire, groups) == [single(mean) for mean in means]
    assert back.tolist() == [math.copysign(single(means[group[i]]), float(x[i])) for i in range(n)]


@over(bins=(2, 3, 16, 300), seed=range(0, 40, 3))
def test_quantile_by_hand(bins: int, seed: int) -> None:
    x = some(seed)[0][:50]
    n = x.numel()
    values, count, whole = x.tolist(), min(bins, n), Segments.whole(n)
    order = sorted(range(n), key=lambda i: (values[i], i))
    below, above = [i for i in order if values[i] < 0], [i for i in order if values[i] >= 0]
    share = math.floor(count * len(below) / n + 0.5)
    share = min(max(share, 1), count - 1) if below and above else share
    members: list[list[int]] = [[] for _ in range(count)]
    for part, first, bins_of in ((below, 0, share), (above, share, count - share)):
        for rank, i in enumerate(part):
            members[first + rank * bins_of // len(part)].append(i)
    assert all(members)
    means = [single(math.fsum(values[i] for i in part) / len(part)) for part in members]
    expected = {i: mean for part, mean in zip(members, means, strict=True) for i in part}
    wire = agree(lambda: kernels.quantile_encode(x, whole, bins))
    back = agree(lambda: kernels.quantile_add_(wire, whole, torch.zeros(n), bins))
    assert wire.numel() == 4 * count + math.ceil(n * math.ceil(math.log2(count)) / 8)
    assert floats(wire, count) == means == sorted(means)
    assert back.tolist() == [expected[i] for i in range(n)]


@over(base_levels=((2.0, 15), (1.2, 63), (3.0, 4)))
def test_powers_are_the_rounded_logarithm(base_levels: tuple[float, int]) -> None:
    """Away from the borders, where the logarithm's own rounding decides."""
    (base, levels), whole = base_levels, Segments.whole(2000)
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)) ** 5
    bounds, powers = powers_of(base, levels, 0.5), powers_of(base, levels, 0.0)
    wire = agree(lambda: kernels.powers_encode(x, whole, bounds))
    back = agree(lambda: kernels.powers_add_(wire, whole, torch.zeros(2000), powers))
    largest = float(x.abs().max())
    for value, got in zip(x.tolist(), back.tolist(), strict=True):
        exact = math.log(largest / abs(value), base)
        if abs(exact % 1 - 0.5) > 1e-4:
            q = round(exact)
            expected = math.copysign(largest * base**-q, value) if q < levels else 0.0
            assert got == pytest.approx(expected, rel=3e-7)


@over(kind=KINDS, bad=(NAN, INF, -INF))
def test_nan_and_inf_are_refused(kind: tuple, bad: float) -> None:
    (encode, _, book, _), x = kind, spoilt(100, 57, bad)
    refused("NaN or Inf", lambda: encode(x, Segments((0, 50), (50, 50)), book), error=NonFiniteError)
    assert agree(lambda: encode(x, Segments((0, 60), (50, 40)), book)).numel() > 0  # without that entry


DAMAGED: tuple[tuple[str, list[float], list[int]], ...] = (  # a codebook of three entries, and its codes
    *(("hierarchy of 1", [bad], [0]) for bad in (NAN, INF, -1.0)),
    *(("hierarchy of 5", [1.0, bad, 0.5], [0, 0]) for bad in (NAN, INF, -1.0)),
    *(("powers", [bad], [0, 0]) for bad in (NAN, INF, -1.0)),
    ("quantile of 24", [0.0, INF, 1.0], [0]),
    ("hierarchy of 1", [1.0], [0b1000]),  # three signs, and a bit behind them
    ("hierarchy of 5", [1.0, 0.5, 0.25], [0b011, 0]),  # group 3 of 3
    ("hierarchy of 5", [1.0, 0.5, 0.25], [0, 0b10]),  # nine bits are in use
    ("quantile of 24", [0.0, 1.0, 2.0], [0b11]),
    ("quantile of 24", [0.0, 1.0, 2.0], [0b01000000]),
    ("powers", [1.0], [0b10000, 0]),  # a sign without a level
    ("powers", [1.0], [0, 0b10000000]),
    ("powers", [1.0], [0, 0, 0]),
    ("powers", [1.0], [0]),
)


@over(damaged=DAMAGED)
def test_decoders_refuse_wires_that_no_encoder_makes(damaged: tuple[str, list[float], list[int]]) -> None:
    (kind, book, codes), out = damaged, torch.zeros(3)
    _, add, _, values = KINDS[kind]
    wire = torch.cat([bytes_of(book), wire_of(*codes)])
    refused(None, lambda: add(wire, Segments.whole(3), out, values, 1.0))


WIRE, TOO_MANY = torch.zeros(8, dtype=torch.uint8), torch.linspace(1e-3, 1, 70000)


@over(
    wrong=(
        *(("hierarchy", "levels", levels) for levels in (0, 257, 70000)),
        *(("quantile", "bins", bins) for bins in (1, 65537, 140000)),
        ("powers", "levels", TOO_MANY),
    )
)
def test_numbers_beyond_a_codebook_are_refused(wrong: tuple) -> None:
    (kind, name, number), whole = wrong, Segments.whole(4)
    encode, add = getattr(kernels, f"{kind}_encode"), getattr(kernels, f"{kind}_add_")
    calls = (lambda: encode(torch.ones(4), whole, number), lambda: add(WIRE, whole, torch.ones(4), number))
    refused(name, *calls, error=ValueError)


def test_positions_of_a_negative_size_are_refused() -> None:
    for size, k in ((-5, 3), (5, -3)):
        call = partial(kernels.random_indices, torch.tensor([size]), torch.tensor([k]), (7,))
        refused("0 or more", call, error=ValueError)
