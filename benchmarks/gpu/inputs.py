"""Inputs of the checks: values that kernels tend to get wrong, lengths around tile sizes, odd starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common.resnet50 import SIZES
from laconic import kernels
from laconic.core.layout import Segments

LENGTHS = (0, 1, 7, 40, 511, 512, 513, 4095, 4096, 4097, 8192, 12289, 65537)
HUGE = 3.4028e38
LARGE = (1 << 24) + 5  # elements of the longest single tensor


def _normal(n: int, rng: torch.Generator) -> Tensor:
    return torch.randn(n, generator=rng)


def _cubes(n: int, rng: torch.Generator) -> Tensor:
    return torch.randn(n, generator=rng) ** 3


def _constant(n: int, rng: torch.Generator) -> Tensor:
    return torch.full((n,), -0.37)


def _zeros(n: int, rng: torch.Generator) -> Tensor:
    return torch.zeros(n)


def _denormal(n: int, rng: torch.Generator) -> Tensor:
    return torch.randn(n, generator=rng) * 1e-41


def _huge(n: int, rng: torch.Generator) -> Tensor:
    return torch.randn(n, generator=rng).sign() * HUGE


def _minus_zero(n: int, rng: torch.Generator) -> Tensor:
    x = torch.randn(n, generator=rng) * (torch.rand(n, generator=rng) < 0.3)
    return torch.where(x == 0, -torch.zeros(n), x)


def _ties(n: int, rng: torch.Generator) -> Tensor:
    return torch.randint(-4, 5, (n,), generator=rng).float() / 8


VALUES: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": _normal,
    "cubes": _cubes,
    "constant": _constant,
    "zeros": _zeros,
    "denormal": _denormal,
    "huge": _huge,
    "minus zero": _minus_zero,
    "ties": _ties,
}


@dataclass(frozen=True)
class Input:
    """A flat buffer on the CPU, the segments that a kernel processes, and a key for each."""

    label: str
    x: Tensor
    segments: Segments
    keys: tuple[int, ...]


def values(kind: str, n: int, seed: int = 7) -> Tensor:
    """Return float32 (n,) of a kind, the same in every call."""
    return VALUES[kind](n, torch.Generator().manual_seed(seed + n))


def keys(count: int) -> tuple[int, ...]:
    """Return keys of 64 bits, all different."""
    return tuple((0x9E3779B97F4A7C15 * (i + 1)) % (1 << 64) for i in range(count))


def odd_starts(sizes: Sequence[int], gap: int = 3) -> Segments:
    """Return segments of these sizes with gaps between them, so that most starts are not aligned.

    >>> odd_starts((4, 2))
    Segments(starts=(1, 8), sizes=(4, 2))
    """
    starts, at = [], 1
    for size in sizes:
        starts.append(at)
        at += size + gap
    return Segments(tuple(starts), tuple(sizes))


def make(label: str, kind: str, segments: Segments) -> Input:
    """Return an input whose buffer ends 5 elements after the last segment: nothing may change there."""
    return Input(label, values(kind, segments.end + 5), segments, keys(len(segments)))


def short() -> list[Input]:
    """Return each kind of values in tensors of all lengths of one message, with odd starts and without."""
    found = []
    for kind in VALUES:
        found.append(make(f"{kind}, {len(LENGTHS)} lengths, odd starts", kind, odd_starts(LENGTHS)))
    aligned = tuple(n + -n % 4 for n in LENGTHS)
    found.append(make("cubes, aligned starts", "cubes", Segments.consecutive(aligned)))
    found += [make(f"cubes, one tensor of {n}", "cubes", Segments.whole(n)) for n in LENGTHS]
    return found


def long(small: bool = False) -> list[Input]:
    """Return one long tensor, and ResNet-50's 161 tensors, consecutive and with odd starts."""
    n, divide = (1 << 16) + 5 if small else LARGE, 512 if small else 1
    sizes = [max(1, size // divide) for size in SIZES]
    small_sizes = [size // 16 + 1 for size in sizes]
    return [
        make(f"normal, one tensor of {n}", "normal", Segments.whole(n)),
        make("cubes, 161 tensors", "cubes", Segments.consecutive(sizes)),
        make("cubes, 161 short tensors, odd starts", "cubes", odd_starts(small_sizes)),
    ]


def tied(kind: str, n: int = 20000, block: int = 512) -> Input:
    """Return values whose fractions equal the random numbers they are compared with, or nearly so.

    Stochastic rounding compares 24 bits; kernels compare 16 of them first, and read the other 8 where
    these are equal. Here they are equal for almost every element.

    Args:
        kind: "levels": unit 1 in each block of a min-max code of 4 bits or of a quantiser of 7 levels;
            "unit": the largest |x| is 1; "powers": the bits of a mantissa.
    """
    segments = odd_starts((n, 4097, n))
    drawn = keys(len(segments))
    x = torch.zeros(segments.end + 5)
    for view, key in zip(segments.views(x), drawn, strict=True):
        dither = kernels.dither24(key, view.numel())
        offset = torch.tensor([-100, -2, -1, 0, 1, 2, 100], dtype=torch.int32)
        near = (dither + offset[torch.arange(view.numel()) % 7]).clamp(0, (1 << 24) - 1)
        if kind == "powers":
            view.copy_((0x3F800000 | near >> 1).view(torch.float32))
        else:
            view.copy_(near.float() / 2.0**24)
            view[0::block], view[1::block] = 0.0, {"levels": 15.0, "sevens": 7.0, "unit": 1.0}[kind]
            view[2::4] *= 1.0 if kind == "levels" else -1.0
    return Input(f"forced ties ({kind})", x, segments, drawn)
