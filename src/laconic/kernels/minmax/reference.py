"""Min-max quantisation in plain torch: what the native kernels must equal, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from laconic.core.errors import NonFiniteError, WireError
from laconic.core.layout import Segments
from laconic.kernels.bitpack import pack_bits, unpack_bits
from laconic.kernels.minmax.form import MinMaxForm, minmax_nbytes
from laconic.kernels.philox import dither24

FARTHEST = 2.0**126  # ends of a range are cut off here, so that no range and no value overflows
INFINITE = 0x7F800000  # bits of |x|, from which on x is Inf or NaN
MAGNITUDE = 0x7FFFFFFF


def not_finite(number: int, segments: Segments) -> NonFiniteError:
    """What is raised for tensor `number` of a message."""
    return NonFiniteError(
        f"a range has no place for NaN or Inf, but tensor {number} of the message "
        f"({segments.sizes[number]} elements) holds them: skip such a step, as `compress` does"
    )


def encode(x: Tensor, segments: Segments, keys: Sequence[int], form: MinMaxForm) -> Tensor:
    """Uint8 (m,): the wires of the tensors, one after the other."""
    parts = [x.new_empty(0, dtype=torch.uint8)]
    for number, (view, key, width) in enumerate(zip(segments.views(x), keys, form.widths, strict=True)):
        if not bool(torch.isfinite(view).all()):
            raise not_finite(number, segments)
        if view.numel():
            units, lows = ranges(view, width, form.block)
            parts.append(torch.stack([units, lows], dim=1).view(-1).view(torch.uint8))
            drawn = key if form.stochastic else None
            parts.append(pack_bits(levels(view, units, lows, width, form.block, drawn), width))
    return torch.cat(parts)


def ranges(x: Tensor, width: int, block: int) -> tuple[Tensor, Tensor]:
    """Unit and minimum of each block of x (n > 0,): float32 (B,) each."""
    n = x.numel()
    rows = pad(x, (0, -n % block)).view(-1, block)
    rows[-1, n % block or block :] = x[-1]  # no new extreme
    low, high = (ends.clamp(-FARTHEST, FARTHEST) + 0.0 for ends in torch.aminmax(rows, dim=1))
    return (high - low) / torch.tensor(float((1 << width) - 1), device=x.device), low


def levels(x: Tensor, units: Tensor, lows: Tensor, width: int, block: int, key: int | None) -> Tensor:
    """Int32 (n,) of one tensor: to nearest, or at random by a key."""
    most = float((1 << width) - 1)
    unit, low = spread(units, x.numel(), block), spread(lows, x.numel(), block)
    y = torch.where(unit == 0, 0.0, (x - low) / unit).clamp(0, most)
    if key is None:
        return (y + 0.5).clamp(max=most).to(torch.int32)
    level = y.to(torch.int32)
    threshold = ((y - level) * 2.0**24).to(torch.int32)
    return level + (dither24(key, x.numel(), device=x.device) < threshold)


def spread(per_block: Tensor, n: int, block: int) -> Tensor:
    """One value a block as one an element."""
    return per_block.repeat_interleave(block)[:n] if block < n else per_block.expand(n)


def add_(wire: Tensor, segments: Segments, out: Tensor, form: MinMaxForm, alpha: float) -> Tensor:
    """out += alpha * values, once the whole wire has been found valid."""
    found, at, block = [], 0, form.block
    for number, (n, width) in enumerate(zip(segments.sizes, form.widths, strict=True)):
        head = minmax_nbytes(n, 0, block)
        end = at + minmax_nbytes(n, width, block)
        ends = wire[at : at + head].clone().view(torch.int32).view(-1, 2)
        if bool(((ends[:, 0] < 0) | (ends[:, 0] >= INFINITE) | (ends[:, 1] & MAGNITUDE >= INFINITE)).any()):
            raise WireError(f"a unit of tensor {number} is negative, or a unit or minimum not finite")
        units, lows = ends.view(torch.float32).unbind(dim=1)
        if not bool((lows + float((1 << width) - 1) * units).isfinite().all()):
            raise WireError(f"a range of tensor {number} has no finite end")
        level = unpack_bits(wire[at + head : end].contiguous(), width, n)
        found.append(
            spread(lows, n, block) + level.to(torch.float32) * spread(units, n, block) if n else None
        )
        at = end
    for view, value in zip(segments.views(out), found, strict=True):
        if value is not None:
            view.add_(value * alpha)
    return out
