"""Natural compression in torch integers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from laconic.core.deferred import check
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.core.turn import MASK
from laconic.kernels.philox.reference import dithers24
from laconic.kernels.sign import reference as sign

MANTISSA, LARGEST = (1 << 23) - 1, 254
LOWEST, CODES = 18, 127
BAD_EXPONENT = f"an exponent is at most {LARGEST}, got 255"


def rounded(pattern: Tensor, dither: Tensor) -> Tensor:
    """Round float bits to exponents; above 254 where not finite."""
    exponent = pattern >> 23 & 255
    up = dither < (pattern & MANTISSA) << 1
    return exponent.add_(up)


def natural_encode(x: Tensor, segments: Segments, keys: Sequence[int], bits: int) -> tuple[Tensor, Tensor]:
    """Return the message, and whether a value is not finite."""
    sizes = segments.sizes
    if not segments.numel:
        nothing = torch.empty(0, dtype=torch.uint8, device=x.device)
        return nothing, torch.zeros(1, dtype=torch.int32, device=x.device)
    pattern = segments.joined.gathered(x).view(torch.int32)
    infinite = (pattern & ~(-1 << 31) > MANTISSA | LARGEST << 23).any().to(torch.int32).view(1)
    exponents = rounded(pattern, dithers24([key & MASK for key in keys], sizes, x.device)).clamp_(max=LARGEST)
    if bits == 9:
        signs = sign.pack(pattern < 0, sizes)
        return sign.interleaved(signs, exponents.to(torch.uint8), *_parts(sizes)), infinite
    codes = exponents.sub_(LOWEST).clamp_(0, CODES)
    return codes.bitwise_or_(pattern >> 24 & 128).to(torch.uint8), infinite


def natural_add_(wire: Tensor, segments: Segments, out: Tensor, alpha: float, bits: int) -> Tensor:
    sizes = segments.sizes
    if not segments.numel:
        return out
    if bits == 8:
        return segments.add_(out, _codes(out.device).index_select(0, wire.to(torch.int32)).mul_(alpha))
    signs, exponents = sign.apart(wire, *_parts(sizes))
    flags = torch.stack([(exponents > LARGEST).any(), sign.padded_wrongly(signs, sizes)])
    check(flags.to(torch.int32), lambda i: WireError((BAD_EXPONENT, sign.BAD_PADDING)[i]))
    powers = (exponents.to(torch.int32) << 23).bitwise_or_(sign.unpacked(signs, sizes)).view(torch.float32)
    values = powers.mul_(alpha)
    if not out.is_cpu:  # flags may be read later
        values.masked_fill_(flags.any(), -0.0)
    return segments.add_(out, values)


def _parts(sizes: tuple[int, ...]) -> tuple[list[int], list[int]]:
    return [(n + 7) // 8 for n in sizes], list(sizes)


@lru_cache(maxsize=16)
def _codes(device: torch.device) -> Tensor:
    code = torch.arange(256, dtype=torch.int32, device=device)
    exponents = torch.where(code & 127 > 0, (code & 127) + LOWEST, 0)
    return (exponents << 23 | code >> 7 << 31).view(torch.float32)
