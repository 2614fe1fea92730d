"""Natural compression in torch integers: what the native kernels must equal, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.core.turn import MASK
from laconic.kernels.philox.reference import dither24
from laconic.kernels.sign.reference import flipped, sign_bits

MANTISSA, LARGEST = (1 << 23) - 1, 254
LOWEST, CODES = 18, 127


def rounded(x: Tensor, key: int) -> tuple[Tensor, bool]:
    """Exponents int32 (n,) after rounding, 254 at most; and whether all of x is finite."""
    pattern = x.view(torch.int32) if x.numel() else x.new_empty(0, dtype=torch.int32)
    exponent = pattern >> 23 & 255
    up = dither24(key & MASK, x.numel(), device=x.device) < (pattern & MANTISSA) << 1
    return (exponent + up).clamp(max=LARGEST), not bool((exponent > LARGEST).any())


def natural_encode(x: Tensor, segments: Segments, keys: Sequence[int], bits: int) -> tuple[Tensor, bool]:
    """The message, and whether all is finite."""
    parts, finite = [x.new_empty(0, dtype=torch.uint8)], True
    for view, key in zip(segments.views(x), keys, strict=True):
        exponents, good = rounded(view, key)
        finite &= good
        if bits == 9:
            parts += [sign_bits(view), exponents.to(torch.uint8)]
        else:
            codes = (exponents - LOWEST).clamp(0, CODES)
            parts.append((codes | torch.signbit(view).to(torch.int32) << 7).to(torch.uint8))
    return torch.cat(parts), finite


def powers(exponents: Tensor) -> Tensor:
    """2^(e - 127) float32 (n,) of exponents e uint8 or int32 (n,), and 0 for e = 0."""
    shifted = exponents.to(torch.int32) << 23
    return shifted.view(torch.float32) if len(shifted) else shifted.float()


def natural_add_(wire: Tensor, segments: Segments, out: Tensor, alpha: float, bits: int) -> Tensor:
    """out += alpha * decoded, once all of the message is decoded."""
    at, decoded = 0, []
    for n in segments.sizes:
        if bits == 9:
            middle, end = at + (n + 7) // 8, at + (n + 7) // 8 + n
            exponents = wire[middle:end]
            if bool((exponents > LARGEST).any()):
                raise WireError(f"an exponent is at most {LARGEST}, got 255")
            decoded.append(flipped(wire[at:middle], powers(exponents)))
        else:
            end = at + n
            codes = wire[at:end].to(torch.int32)
            exponents = torch.where(codes & 127 > 0, (codes & 127) + LOWEST, 0)
            decoded.append(torch.where(codes > 127, -powers(exponents), powers(exponents)))
        at = end
    for view, values in zip(segments.views(out), decoded, strict=True):
        view.add_(values * alpha)
    return out
