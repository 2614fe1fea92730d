"""Plan of a message's launches."""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
import triton
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels.quantise.base3_kernels import FIVES
from laconic.kernels.quantise.form import Form
from laconic.kernels.quantise.places import Places, owners, places
from laconic.kernels.quantise.tile import TILE
from laconic.kernels.tiles import tiles


@dataclass(frozen=True)
class Plan:
    """Arguments of the launches for some tensors. `tiles`: whole, then masked."""

    at: Places
    tiles: tuple[tuple[int, bool, Tensor, Tensor], ...]  # count, masked, segment, first
    columns: int
    aligned: bool  # each tensor begins at a multiple of 16 bytes if x does
    inverse: tuple[float, float]


@lru_cache(maxsize=512)
def plan(segments: Segments, form: Form, device: torch.device) -> Plan:
    full, last = tiles(segments.sizes, TILE, device)
    return Plan(
        at=places(segments, form, device),
        tiles=tuple(
            (len(which), masked, which.segment, which.first)
            for which, masked in ((full, False), (last, True))
            if len(which)
        ),
        columns=triton.next_power_of_2(form.bits),
        aligned=all(start % 4 == 0 for start in segments.starts),
        inverse=inverse(form.levels, form.levels),
    )


@lru_cache(maxsize=512)
def parts_of(segments: Segments, size: int, device: torch.device) -> Places:
    return places(segments, Form(1, size), device)


@lru_cache(maxsize=512)
def fives(segments: Segments, device: torch.device) -> tuple[tuple[int, Tensor, Tensor], ...]:
    """Return tiles of FIVES bytes: count, segment, first. Whole tiles come first."""
    both = tiles(segments.sizes, 5 * FIVES, device)
    return tuple((len(which), which.segment, which.first) for which in both if len(which))


def aligned(for_all: Plan, x: Tensor) -> bool:
    return for_all.aligned and x.data_ptr() % 16 == 0


@lru_cache(maxsize=512)
def inverse(levels: int, most: int) -> tuple[float, float]:
    """Return float32 high, low: k * high + k * low is k / levels for k = 0..most, bit for bit.

    low is 0 if k * high is enough; both are 0 without such factors, or for too many k to try.
    """
    if not 0 < most < 1 << 15:
        return 0.0, 0.0
    k = np.arange(most + 1, dtype=np.float32)
    wanted = k / np.float32(levels)
    near = np.float32(1 / levels)
    for one in (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(1))):
        if np.array_equal(k * one, wanted):
            return float(one), 0.0
    part = 24 - most.bit_length()  # bits of a factor whose products are exact
    mantissa, exponent = np.frexp(1 / levels)
    high = np.float32(np.ldexp(np.round(np.ldexp(mantissa, part)), exponent - part))
    low = np.float32(1 / levels - float(high))
    return (float(high), float(low)) if np.array_equal(k * high + k * low, wanted) else (0.0, 0.0)


@lru_cache(maxsize=512)
def block_heads(segments: Segments, form: Form, device: torch.device) -> Tensor:
    """Return each scale's place in the wire. Cached: do not modify."""
    at: Places = places(segments, form, device)
    of = owners(at.first_block, at.block_counts, 0, at.blocks)
    inside = torch.arange(at.blocks, dtype=torch.int64, device=device) - at.first_block[of]
    return at.head[of] + 4 * inside


def one_buffer(wires: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Return the first message and the stride; copy unless constant."""
    places_ = [wire.data_ptr() for wire in wires]
    apart = places_[1] - places_[0] if len(wires) > 1 else 0
    if all(later - earlier == apart for earlier, later in pairwise(places_)):
        return wires[0], apart
    return torch.cat(list(wires)), wires[0].numel()
