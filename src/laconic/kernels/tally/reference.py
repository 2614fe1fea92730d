"""Sums of packed levels in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core import deferred
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels.bitpack import reference as bitpack
from laconic.kernels.quantise.form import Form
from laconic.kernels.quantise.reference import levels_add_


def damaged(rank: int | None, most: int) -> WireError:
    whose = "the levels" if rank is None else f"the levels that rank {rank} sent"
    return WireError(f"{whose} are damaged: not in 0..{most}, or not followed by zero bits")


def unpacked(wire: Tensor, n: int, most: int) -> tuple[Tensor, Tensor]:
    """Return integers, and whether one is above `most` or padding is not zero."""
    bits = most.bit_length()
    codes = bitpack.unpack_bits(wire, bits, n)
    if not n:
        return codes, torch.zeros((), dtype=torch.int32, device=wire.device)
    used = n * bits % 8  # of the last byte
    bad = codes.amax() > most
    if used:
        bad |= wire[-1] >> used != 0
    return codes, bad.to(torch.int32)


def packed_sum(wires: Tensor, n: int, most: int) -> Tensor:
    total, first = unpacked(wires[0], n, most)
    flags = [first]
    for wire in wires[1:]:
        codes, flag = unpacked(wire, n, most)
        total += codes
        flags.append(flag)
    deferred.check(torch.stack(flags), lambda rank: damaged(rank, most))
    return bitpack.pack_bits(total, (len(wires) * most).bit_length())


def packed_levels_add_(
    wire: Tensor, scales: Tensor, segments: Segments, out: Tensor, form: Form, alpha: float, ranks: int
) -> Tensor:
    most = 2 * ranks * form.levels
    codes, flag = unpacked(wire, segments.numel, most)
    deferred.check(flag.view(1), lambda _: damaged(None, most))
    return levels_add_(codes - ranks * form.levels, scales, segments, out, form, alpha)
