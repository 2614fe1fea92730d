"""Min-max quantisation in plain torch: what the native kernels must equal, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from laconic.core.errors import NonFiniteError, WireError
from laconic.core.layout import Segments
from laconic.kernels.bitpack import pack_bits, packed_nbytes, unpack_bits
from laconic.kernels.philox import dither24

FARTHEST = 2.0**126  # ends of a range are cut off here, so that no range and no value overflows
INFINITE = 0x7F800000  # bits of |x|, from which on x is Inf or NaN
MAGNITUDE = 0x7FFFFFFF


def buckets_in(n: int, bucket: int) -> int:
    """Buckets of a tensor of n elements."""
    return -(-n // bucket)


def nbytes(n: int, width: int, bucket: int) -> int:
    """Bytes of the wire of a tensor of n elements."""
    return 8 * buckets_in(n, bucket) + packed_nbytes(n, width)


def not_finite(number: int, segments: Segments) -> NonFiniteError:
    """What is raised for tensor `number` of a message."""
    return NonFiniteError(
        f"a range has no place for NaN or Inf, but tensor {number} of the message "
        f"({segments.sizes[number]} elements) holds them: skip such a step, as `compress` does"
    )


def encode(
    x: Tensor, segments: Segments, keys: Sequence[int], widths: Sequence[int], bucket: int, stochastic: bool
) -> Tensor:
    """Uint8 (m,): the wires of the tensors, one after the other."""
    parts = [x.new_empty(0, dtype=torch.uint8)]
    for number, (view, key, width) in enumerate(zip(segments.views(x), keys, widths, strict=True)):
        if not bool(torch.isfinite(view).all()):
            raise not_finite(number, segments)
        if view.numel():
            units, lows = ranges(view, width, bucket)
            parts.append(torch.stack([units, lows], dim=1).view(-1).view(torch.uint8))
            parts.append(
                pack_bits(levels(view, units, lows, width, bucket, key if stochastic else None), width)
            )
    return torch.cat(parts)


def ranges(x: Tensor, width: int, bucket: int) -> tuple[Tensor, Tensor]:
    """Unit and minimum of each bucket of x (n > 0,): float32 (B,) each."""
    n = x.numel()
    rows = pad(x, (0, -n % bucket)).view(-1, bucket)
    rows[-1, n % bucket or bucket :] = x[-1]  # no new extreme
    low, high = (ends.clamp(-FARTHEST, FARTHEST) + 0.0 for ends in torch.aminmax(rows, dim=1))
    return (high - low) / torch.tensor(float((1 << width) - 1), device=x.device), low


def levels(x: Tensor, units: Tensor, lows: Tensor, width: int, bucket: int, key: int | None) -> Tensor:
    """Int32 (n,) of one tensor: to nearest, or at random by a key."""
    most = float((1 << width) - 1)
    unit, low = spread(units, x.numel(), bucket), spread(lows, x.numel(), bucket)
    y = torch.where(unit == 0, 0.0, (x - low) / unit).clamp(0, most)
    if key is None:
        return (y + 0.5).clamp(max=most).to(torch.int32)
    level = y.to(torch.int32)
    threshold = ((y - level) * 2.0**24).to(torch.int32)
    return level + (dither24(key, x.numel(), device=x.device) < threshold)


def spread(per_bucket: Tensor, n: int, bucket: int) -> Tensor:
    """One value a bucket as one an element."""
    return per_bucket.repeat_interleave(bucket)[:n] if bucket < n else per_bucket.expand(n)


def add_(
    wire: Tensor, segments: Segments, out: Tensor, alpha: float, widths: Sequence[int], bucket: int
) -> Tensor:
    """out += alpha * values, once the whole wire has been found valid."""
    found, at = [], 0
    for number, (n, width) in enumerate(zip(segments.sizes, widths, strict=True)):
        head = 8 * buckets_in(n, bucket)
        end = at + nbytes(n, width, bucket)
        ends = wire[at : at + head].clone().view(torch.int32).view(-1, 2)
        if bool(((ends[:, 0] < 0) | (ends[:, 0] >= INFINITE) | (ends[:, 1] & MAGNITUDE >= INFINITE)).any()):
            raise WireError(f"a unit of tensor {number} is negative, or a unit or minimum not finite")
        units, lows = ends.view(torch.float32).unbind(dim=1)
        level = unpack_bits(wire[at + head : end].contiguous(), width, n)
        found.append(
            spread(lows, n, bucket) + level.to(torch.float32) * spread(units, n, bucket) if n else None
        )
        at = end
    for view, value in zip(segments.views(out), found, strict=True):
        if value is not None:
            view.add_(value * alpha)
    return out
