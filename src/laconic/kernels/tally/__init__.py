"""Packed sums of many ranks' levels, and their values."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core import deferred
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels import checks, dispatch
from laconic.kernels.bitpack import pack_bits, packed_nbytes
from laconic.kernels.quantise.form import Form
from laconic.kernels.tally import reference

MOST = (1 << 30) - 1  # integer and sum


def packed_sum(wires: Tensor, n: int, most: int) -> Tensor:
    """Sum n integers in 0..most over ranks, packed: uint8 (ranks, m) to uint8 (m',).

    An integer has bit_length(most) bits, a sum bit_length(ranks * most). Raises `WireError`, with the rank,
    for an integer above `most` and nonzero padding.

    >>> wires = torch.tensor([[0b10_01_00], [0b10_00_01]], dtype=torch.uint8)
    >>> f"{int(packed_sum(wires, n=3, most=2)[0]):b}"  # sums 1, 1, 4 in three bits each, lowest first
    '1001'
    """
    ranks, (bits, sum_bits) = len(wires), _bits(most, len(wires))
    checks.flat("wires", wires.view(-1), torch.uint8)
    if wires.shape[1] != packed_nbytes(n, bits):
        raise WireError(
            f"{n} integers up to {most} fill {packed_nbytes(n, bits)} bytes, got {wires.shape[1]}"
        )
    if dispatch.gpu(wires) and sum_bits <= 16:
        from laconic.kernels.quantise import packed_sums

        summed, flags = packed_sums.packed_sum(wires, n, most, bits, sum_bits)
        deferred.check(flags, lambda rank: reference.damaged(rank, most))
        return summed
    if (native := dispatch.native(wires)) is None:
        return reference.packed_sum(wires, n, most)
    sums = torch.empty(packed_nbytes(n, sum_bits), dtype=torch.uint8, device="cpu")
    bad = native.packed_sum(wires.view(-1), ranks, n, most, sums)
    if bad >= 0:
        raise reference.damaged(bad, most)
    return sums


def pack_levels(signed: Tensor, levels: int) -> Tensor:
    """Pack levels int32 (n,) in -levels..levels as codes in 0..2 * levels: uint8 (m,)."""
    checks.flat("signed", signed, torch.int32)
    bits = _bits(2 * levels, 1)[0]
    if dispatch.gpu(signed) and bits <= 16:
        from laconic.kernels.quantise import packed_sums

        return packed_sums.pack_levels(signed, levels, bits)
    return pack_bits(signed + levels, bits)


def packed_levels_add_(
    wire: Tensor,
    scales: Tensor,
    segments: Segments,
    out: Tensor,
    form: Form,
    alpha: float = 1.0,
    ranks: int = 1,
) -> Tensor:
    """Add alpha * (code - ranks * levels) / levels * scale to the segments of `out`, in place.

    `wire` uint8 has K packed codes in 0..2 * ranks * levels: sums over ranks of signed levels, or one
    rank's. `scales` float32 (B,). The grid of `form` is uniform. Raises `WireError` for other codes;
    `out` is then undefined.
    """
    bits = _checked(wire, scales, segments, out, form, ranks)
    if dispatch.gpu(wire, scales, out) and _has_kernel(form, bits):
        return _on_gpu_(wire, bits, scales, segments, out, form, alpha, ranks, fresh=False)
    if (native := dispatch.native(wire, scales, out)) is None:
        return reference.packed_levels_add_(wire, scales, segments, out, form, alpha, ranks)
    if not native.packed_levels_add_(wire, scales, segments, out, form, alpha, ranks):
        raise reference.damaged(None, 2 * ranks * form.levels)
    return out


def packed_levels_(
    wire: Tensor,
    scales: Tensor,
    segments: Segments,
    out: Tensor,
    form: Form,
    alpha: float = 1.0,
    ranks: int = 1,
) -> Tensor:
    """Write the values that `packed_levels_add_` adds."""
    bits = _checked(wire, scales, segments, out, form, ranks)
    if dispatch.gpu(wire, scales, out) and _has_kernel(form, bits):
        return _on_gpu_(wire, bits, scales, segments, out, form, alpha, ranks, fresh=True)
    return packed_levels_add_(wire, scales, segments, segments.zero_(out), form, alpha, ranks)


def _checked(wire: Tensor, scales: Tensor, segments: Segments, out: Tensor, form: Form, ranks: int) -> int:
    bits = _bits(2 * form.levels, ranks)[1]
    checks.flat("wire", wire, torch.uint8)
    checks.flat("scales", scales)
    checks.buffer("out", out, segments)
    expected = packed_nbytes(segments.numel, bits)
    if wire.numel() != expected or scales.numel() != form.blocks(segments):
        raise WireError(
            f"{segments.numel} codes of {bits} bits in {form.blocks(segments)} blocks are {expected} bytes"
            f" and {form.blocks(segments)} scales, got {wire.numel()} and {scales.numel()}"
        )
    return bits


def _has_kernel(form: Form, bits: int) -> bool:
    return form.block % 8 == 0 and not form.powers and bits <= 24


def _on_gpu_(
    wire: Tensor,
    bits: int,
    scales: Tensor,
    segments: Segments,
    out: Tensor,
    form: Form,
    alpha: float,
    ranks: int,
    *,
    fresh: bool,
) -> Tensor:
    from laconic.kernels.quantise import packed_sums

    flags = torch.zeros(1, dtype=torch.int32, device=wire.device)
    zero = ranks * form.levels
    packed_sums.add_levels_(wire, bits, zero, scales, flags, segments, out, form, alpha, fresh)
    deferred.check(flags, lambda _: reference.damaged(None, 2 * zero))
    return out


def _bits(most: int, ranks: int) -> tuple[int, int]:
    if most < 1 or ranks < 1 or ranks * most > MOST:
        raise ValueError(f"sums are in 1..{MOST}, got {ranks} ranks of integers up to {most}")
    return most.bit_length(), (ranks * most).bit_length()
