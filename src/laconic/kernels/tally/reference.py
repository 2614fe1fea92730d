"""Tallies in plain torch: unpack all, add, pack."""

from __future__ import annotations

from torch import Tensor

from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels.bitpack import pack_bits, unpack_bits
from laconic.kernels.quantise import levels_add_
from laconic.kernels.quantise.form import Form


def damaged(rank: int | None, most: int) -> WireError:
    """What is raised where integers are not what a rank can have packed."""
    whose = "the levels" if rank is None else f"the levels that rank {rank} sent"
    return WireError(f"{whose} are damaged: not in 0..{most}, or not followed by zero bits")


def unpacked(wire: Tensor, n: int, most: int, rank: int | None = None) -> Tensor:
    """Integers int32 (n,) in 0..most."""
    try:
        codes = unpack_bits(wire, most.bit_length(), n)
    except WireError:
        raise damaged(rank, most) from None
    if n and int(codes.max()) > most:
        raise damaged(rank, most)
    return codes


def packed_sum(wires: Tensor, n: int, most: int) -> Tensor:
    """Sums uint8 (m',) of wires uint8 (ranks, m)."""
    total = unpacked(wires[0], n, most, rank=0)
    for rank in range(1, len(wires)):
        total += unpacked(wires[rank], n, most, rank)
    return pack_bits(total, (len(wires) * most).bit_length())


def packed_levels_add_(
    wire: Tensor, scales: Tensor, segments: Segments, out: Tensor, form: Form, alpha: float, ranks: int
) -> Tensor:
    """out += alpha * values of the codes."""
    signed = unpacked(wire, segments.numel, 2 * ranks * form.levels) - ranks * form.levels
    return levels_add_(signed, scales, segments, out, form, alpha)
