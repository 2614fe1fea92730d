"""Bit packing in plain torch: eight codes of b bits fill b bytes and share their shifts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from laconic.core.errors import WireError


def overlaps(bits: int) -> Iterator[tuple[int, int, int]]:
    """Yield (byte, code, shift) that share bits; the byte starts `shift` bits into the code."""
    for byte in range(bits):
        for code in range(8):
            shift = 8 * byte - bits * code
            if -8 < shift < bits:
                yield byte, code, shift


def moved(x: Tensor, shift: int) -> Tensor:
    return x << shift if shift >= 0 else x >> -shift


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    n = codes.numel()
    if bits <= 8:
        low = (codes & (1 << bits) - 1).to(torch.uint8)
        return pack_bytes(pad(low, (0, -n % 8)), bits)[: (n * bits + 7) // 8]
    groups = pad(codes.to(torch.int64) & (1 << bits) - 1, (0, -n % 8)).view(-1, 8)
    out = groups.new_zeros(groups.shape[0], bits)
    for byte, code, shift in overlaps(bits):
        out[:, byte] |= moved(groups[:, code], -shift) & 255
    return out.to(torch.uint8).flatten()[: (n * bits + 7) // 8].clone()


def unpack_bits(wire: Tensor, bits: int, n: int) -> Tensor:
    if bits <= 8:
        return unpack_bytes(pad(wire, (0, -wire.numel() % bits)), bits)[:n].to(torch.int32)
    groups = pad(wire.to(torch.int64), (0, -wire.numel() % bits)).view(-1, bits)
    out = groups.new_zeros(groups.shape[0], 8)
    for byte, code, shift in overlaps(bits):
        out[:, code] |= moved(groups[:, byte], shift) & (1 << bits) - 1
    codes = out.flatten()[:n]
    return torch.where(codes >= 1 << 31, codes - (1 << 32), codes).to(torch.int32)


# Codes lie one per lane; neighbouring lanes are joined, two at a time. Codes that fill one byte need no mask.
LANES = {1: torch.int64, 2: torch.int32, 4: torch.int16}


def _even(bits: int, lane: int, x: Tensor) -> int:
    return sum(((1 << bits) - 1) << at for at in range(0, 8 * x.itemsize, 2 * lane))


def pack_bytes(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes below 2^bits, bits <= 8, to bytes; n is a multiple of 8."""
    if bits == 8:
        return codes
    lane, held = 8, bits
    if bits in LANES:
        x = codes.view(LANES[bits])
        while held < 8:
            x = x | x >> lane - held
            lane, held = 2 * lane, 2 * held
        return x.to(torch.uint8)
    x = codes.view(torch.int64)
    while lane < 64:
        mask = _even(held, lane, x)
        x = (x & mask) | (x & mask << lane) >> lane - held
        lane, held = 2 * lane, 2 * held
    return x.view(torch.uint8).view(-1, 8)[:, :bits].reshape(-1)


def unpack_bytes(wire: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return wire
    if bits in LANES:
        x = wire.to(LANES[bits])
        lane = 4 * 8 // bits
    else:
        x = pad(wire.view(-1, bits), (0, 8 - bits)).view(torch.int64).view(-1)
        lane = 32
    while lane >= 8:
        held = bits * lane // 8
        mask = _even(held, lane, x)
        x = (x & mask) | (x & mask << held) << lane - held
        lane //= 2
    return x.view(torch.uint8)


def is_ternary(levels: Tensor) -> bool:
    return not bool(((levels < -1) | (levels > 1)).any())


def pack_ternary(levels: Tensor) -> Tensor:
    digits = pad(levels % 3, (0, -levels.numel() % 5)).view(-1, 5)  # -1 becomes 2
    return sum((digits[:, i] * 3**i for i in range(5)), digits.new_zeros(len(digits))).to(torch.uint8)


def unpack_ternary(wire: Tensor, n: int) -> Tensor:
    if bool((wire >= 243).any()):
        raise WireError(f"five levels make a byte of at most 242, got {int(wire.max())}")
    whole = wire.to(torch.int32)
    digits = torch.stack([whole // 3**i % 3 for i in range(5)], dim=1).flatten()
    if bool(digits[n:].any()):
        raise WireError(f"digits after the last of {n} levels must be zero")
    return torch.where(digits == 2, -1, digits)[:n].clone()
