"""Signs and mean magnitudes in plain torch: what the native kernels must equal, means within 1 ulp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels.bitpack import reference as bitpack
from laconic.kernels.philox import reference as philox


def means(x: Tensor, block: int) -> Tensor:
    """Mean magnitude float32 (blocks,) of x (n,)."""
    n = x.numel()
    length = block or max(n, 1)
    sums = x.new_zeros(-(-n // length), dtype=torch.float64)
    sums.index_add_(0, torch.arange(n, device=x.device) // length, x.abs().double())
    counts = torch.full_like(sums, length)
    counts[-1:] = n - (len(sums) - 1) * length
    return (sums / counts).float()


def sign_bits(x: Tensor) -> Tensor:
    """uint8 (ceil(n / 8),): bit j of byte i is set where x[8 i + j] is negative; -0.0 is."""
    return bitpack.pack_bits(torch.signbit(x).to(torch.int32), 1)


def flipped(bits: Tensor, values: Tensor) -> Tensor:
    """values float32 (n,), negated where their bit is set. `WireError` where bits after the last are set."""
    n = values.numel()
    if n % 8 and int(bits[-1]) >> n % 8:
        raise WireError(f"the {8 - n % 8} bits after the last of {n} signs must be zero")
    return torch.where(bitpack.unpack_bits(bits, 1, n).bool(), -values, values)


def tossed(bits: Tensor, x: Tensor, key: int) -> Tensor:
    """Sign bits uint8 (m,) of x (n,), with those of zeros from the stream of a key."""
    zero = bitpack.pack_bits((x == 0).to(torch.int32), 1)
    coins = philox.philox(key, (len(bits) + 3) // 4, 0, x.device).view(torch.uint8)[: len(bits)]
    return bits & ~zero | coins & zero


def sign_encode(x: Tensor, segments: Segments, block: int, keys: Sequence[int] | None) -> tuple[Tensor, bool]:
    """The message, and whether all is finite."""
    parts, finite = [x.new_empty(0, dtype=torch.uint8)], True
    for s, view in enumerate(segments.views(x)):
        if view.numel():
            scales = means(view, block)
            finite &= bool(scales.isfinite().all())
            bits = sign_bits(view)
            parts += [scales.view(torch.uint8), bits if keys is None else tossed(bits, view, keys[s])]
    return torch.cat(parts), finite


def sign_add_(wire: Tensor, segments: Segments, out: Tensor, alpha: float, block: int) -> Tensor:
    """out += alpha * decoded, once all of the message is decoded."""
    at, decoded = 0, []
    for n in segments.sizes:
        length = block or max(n, 1)
        head = 4 * -(-n // length)
        scales = wire[at : at + head].clone().view(torch.float32) if n else out.new_empty(0)
        if bool((torch.signbit(scales) | ~scales.isfinite()).any()):
            raise WireError("a mean magnitude is negative or not finite")
        end = at + head + (n + 7) // 8
        decoded.append(flipped(wire[at + head : end], (scales * alpha).repeat_interleave(length)[:n]))
        at = end
    for view, values in zip(segments.views(out), decoded, strict=True):
        view.add_(values)
    return out


def signs(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Sign bits of all segments, and a mean each."""
    views = segments.views(x)
    bits = [sign_bits(view) for view in views if view.numel()]
    scales = [means(view, 0) if view.numel() else x.new_zeros(1) for view in views]
    return torch.cat([x.new_empty(0, dtype=torch.uint8), *bits]), torch.cat([x.new_empty(0), *scales])


def zeros(x: Tensor, segments: Segments) -> Tensor:
    """Bits of all segments, set where x is 0."""
    parts = [bitpack.pack_bits((view == 0).to(torch.int32), 1) for view in segments.views(x)]
    return torch.cat([x.new_empty(0, dtype=torch.uint8), *parts])


def signed_add_(bits: Tensor, values: Tensor, segments: Segments, out: Tensor, alpha: float) -> Tensor:
    """out += alpha * value, signed, once all signs are read."""
    parts = torch.split(bits, [(n + 7) // 8 for n in segments.sizes])
    scaled = values * alpha
    decoded = [flipped(part, scaled[s].repeat(segments.sizes[s])) for s, part in enumerate(parts)]
    for view, each in zip(segments.views(out), decoded, strict=True):
        view.add_(each)
    return out
