"""Sign bits and a mean magnitude per block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.core.deferred import check, numbering
from laconic.core.errors import NonFiniteError, WireError
from laconic.core.layout import Segments
from laconic.kernels import checks, dispatch
from laconic.kernels.sign import reference


def sign_bytes(n: int) -> int:
    return (n + 7) // 8


def sign_nbytes(n: int, block: int) -> int:
    """Return the bytes of n elements: 4 per block mean, then the signs. Block 0 is the whole tensor."""
    return 4 * (-(-n // block) if block else min(n, 1)) + sign_bytes(n)


def sign_encode(x: Tensor, segments: Segments, block: int = 0, keys: Sequence[int] | None = None) -> Tensor:
    """Encode each segment as [mean |x| float32 (blocks,) | sign bits, full bytes].

    Sums are in float64: native means are equal on every target, the reference's within 1 ulp. With a key per
    segment, the sign of a zero at entry i is bit i of the key's `philox`; without, its own. Raises
    `NonFiniteError` for NaN or Inf.

    >>> sign_encode(torch.tensor([1.0, -3.0]), Segments.whole(2)).tolist()  # 2.0, then 0b10
    [0, 0, 0, 64, 2]
    """
    _check(x, segments, block)
    if (native := dispatch.native(x)) is not None:
        wire = torch.empty(_message(segments, block), dtype=torch.uint8, device="cpu")
        tossed = (
            checks.keys64(keys, len(segments))
            if keys is not None
            else torch.empty(0, dtype=torch.int64, device="cpu")
        )
        if not native.sign_encode(x, segments, tossed, block, wire):
            raise _not_finite(0)
    elif on_gpu(block, x):
        from laconic.kernels.sign import gpu

        wire, flags = gpu.encode(x, segments, block, keys)
        check(flags, _not_finite)
    else:
        if keys is not None:
            checks.keys64(keys, len(segments))
        wire, flags = reference.sign_encode(x, segments, block, keys)
        check(flags, _not_finite)
    return wire


def sign_add_(wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1.0, block: int = 0) -> Tensor:
    """Add alpha * mean, negated where the sign bit is set, to the segments, in place.

    Raises `WireError`, before any write, for negative or non-finite means, nonzero padding and wrong lengths.
    """
    _check_message(wire, segments, out, block)
    if (native := dispatch.native(wire, out)) is not None:
        native.sign_add_(wire, segments, block, out, alpha)
        return out
    if on_gpu(block, wire, out):
        from laconic.kernels.sign import gpu

        return gpu.add_([wire], segments, out, alpha, block)
    return reference.sign_add_(wire, segments, out, alpha, block)


def on_gpu(block: int, *tensors: Tensor) -> bool:
    if not dispatch.gpu(*tensors):
        return False
    from laconic.kernels.sign.plan import serves

    return serves(block)


def sign_messages_add_(
    wires: Sequence[Tensor], segments: Segments, out: Tensor, alpha: float = 1.0, block: int = 0
) -> Tensor:
    """Add each message as `sign_add_`, in order. Raises `WireError` with the damaged message's number."""
    for number, wire in enumerate(wires):
        with numbering(number):
            _check_message(wire, segments, out, block)
    if wires and on_gpu(block, out, *wires):
        from laconic.kernels.sign import gpu

        return gpu.add_(wires, segments, out, alpha, block)
    for number, wire in enumerate(wires):
        with numbering(number):
            sign_add_(wire, segments, out, alpha, block)
    return out


def signs(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Return sign bits uint8 (sum of ceil(n_i / 8),) and mean magnitudes float32 (s,), separately.

    A mean is NaN or Inf if its segment has NaN or Inf, and 0 for an empty segment.

    >>> signs(torch.tensor([1.0, -3.0, -1.0]), Segments((0, 2), (2, 1)))
    (tensor([2, 1], dtype=torch.uint8), tensor([2., 1.]))
    """
    checks.buffer("x", x, segments)
    if (native := dispatch.native(x)) is not None:
        bits = torch.empty(sum(map(sign_bytes, segments.sizes)), dtype=torch.uint8, device="cpu")
        means = torch.empty(len(segments), dtype=torch.float32, device="cpu")
        native.signs(x, segments, bits, means)
        return bits, means
    if on_gpu(0, x):
        from laconic.kernels.sign import gpu

        wire, _ = gpu.encode(x, segments, 0, None, apart=True)
        return wire[4 * len(segments) :], wire[: 4 * len(segments)].view(torch.float32)
    return reference.signs(x, segments)


def zeros(x: Tensor, segments: Segments) -> Tensor:
    """Return bits uint8 (sum of ceil(n_i / 8),) that mark zeros of x, which `signs` cannot express.

    >>> zeros(torch.tensor([1.0, -0.0, 0.0]), Segments.whole(3)).tolist()
    [6]
    """
    checks.buffer("x", x, segments)
    if (native := dispatch.native(x)) is not None:
        bits = torch.empty(sum(map(sign_bytes, segments.sizes)), dtype=torch.uint8, device="cpu")
        native.zeros(x, segments, bits)
        return bits
    return reference.zeros(x, segments)


def signed_add_(bits: Tensor, values: Tensor, segments: Segments, out: Tensor, alpha: float = 1.0) -> Tensor:
    """Add alpha * values[segment], negated where the sign bit is set, to `out`; values float32 (s,)."""
    checks.buffer("out", out, segments)
    checks.flat("bits", bits, torch.uint8)
    checks.flat("values", values)
    expected = sum(map(sign_bytes, segments.sizes))
    if bits.numel() != expected or values.numel() != len(segments):
        raise WireError(
            f"these tensors have {expected} bytes of signs and {len(segments)} values, "
            f"got {bits.numel()} and {values.numel()}"
        )
    if (native := dispatch.native(bits, values, out)) is not None:
        native.signed_add_(bits, values, segments, out, alpha)
        return out
    if on_gpu(0, bits, values, out):
        from laconic.kernels.sign import gpu

        return gpu.add_([torch.cat([values.view(torch.uint8), bits])], segments, out, alpha, 0, apart=True)
    return reference.signed_add_(bits, values, segments, out, alpha)


def _check(x: Tensor, segments: Segments, block: int) -> None:
    checks.buffer("x", x, segments)
    if block < 0:
        raise ValueError(f"block must not be negative (0 is a whole tensor), got {block}")


def _check_message(wire: Tensor, segments: Segments, out: Tensor, block: int) -> None:
    _check(out, segments, block)
    checks.flat("wire", wire, torch.uint8)
    expected = _message(segments, block)
    if wire.numel() != expected:
        raise WireError(f"signs and means of these tensors fill {expected} bytes, got {wire.numel()}")


def _not_finite(i: int) -> NonFiniteError:
    return NonFiniteError("a mean magnitude cannot hold NaN or Inf: skip such a step, as `compress` does")


def _message(segments: Segments, block: int) -> int:
    return sum(sign_nbytes(size, block) for size in segments.sizes)
