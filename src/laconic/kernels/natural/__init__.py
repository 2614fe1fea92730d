"""Natural compression: each float is rounded at random to a neighbouring power of two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.core.deferred import check, numbering
from laconic.core.errors import NonFiniteError, WireError
from laconic.core.layout import Segments
from laconic.kernels import checks, dispatch
from laconic.kernels.natural import reference
from laconic.kernels.sign import sign_bytes

BITS = (8, 9)


def natural_nbytes(n: int, bits: int) -> int:
    """Return n, plus the bytes of n sign bits with 9 bits."""
    return n + sign_bytes(n) if bits == 9 else n


def natural_encode(x: Tensor, segments: Segments, keys: Sequence[int], bits: int = 9) -> Tensor:
    """Encode the segments, one after the other; `keys` has one key per segment.

        9 bits   [sign bits, padded to bytes | exponent uint8 (n,), 0..254]
        8 bits   [sign 1 | code 7] (n,); code 0 is zero, code c the exponent c + 18

    The exponent e of x = +-2^(e - 127) (1 + m / 2^23) becomes e + 1 iff `dither24` of its element is below 2
    m. Raises `NonFiniteError` for NaN or Inf.

    >>> natural_encode(torch.tensor([1.0, -0.25]), Segments.whole(2), (0,)).tolist()
    [2, 127, 125]
    """
    checks.buffer("x", x, segments)
    _check(bits)
    packed = checks.keys64(keys, len(segments))
    if (native := dispatch.native(x)) is not None:
        wire = torch.empty(_message(segments, bits), dtype=torch.uint8, device="cpu")
        if not native.natural_encode(x, segments, packed, bits, wire):
            raise _not_finite(0)
    elif dispatch.gpu(x):
        from laconic.kernels.natural import gpu

        wire, flags = gpu.encode(x, segments, keys, bits)
        check(flags, _not_finite)
    else:
        wire, flags = reference.natural_encode(x, segments, keys, bits)
        check(flags, _not_finite)
    return wire


def natural_add_(wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1.0, bits: int = 9) -> Tensor:
    """Add alpha * decoded values to the segments, in place.

    Raises `WireError`, before any write, for a wrong length, an exponent of 255 and nonzero padding.
    """
    _check_message(wire, segments, out, bits)
    if (native := dispatch.native(wire, out)) is not None:
        native.natural_add_(wire, segments, bits, out, alpha)
        return out
    if dispatch.gpu(wire, out):
        from laconic.kernels.natural import gpu

        return gpu.add_([wire], segments, out, alpha, bits)
    return reference.natural_add_(wire, segments, out, alpha, bits)


def natural_messages_add_(
    wires: Sequence[Tensor], segments: Segments, out: Tensor, alpha: float = 1.0, bits: int = 9
) -> Tensor:
    """Add each message as `natural_add_`, in order.

    Raises `WireError` with the damaged message's number.
    """
    for number, wire in enumerate(wires):
        with numbering(number):
            _check_message(wire, segments, out, bits)
    if wires and dispatch.gpu(out, *wires):
        from laconic.kernels.natural import gpu

        return gpu.add_(wires, segments, out, alpha, bits)
    for number, wire in enumerate(wires):
        with numbering(number):
            natural_add_(wire, segments, out, alpha, bits)
    return out


def _check_message(wire: Tensor, segments: Segments, out: Tensor, bits: int) -> None:
    checks.buffer("out", out, segments)
    checks.flat("wire", wire, torch.uint8)
    _check(bits)
    expected = _message(segments, bits)
    if wire.numel() != expected:
        raise WireError(f"powers of two of these tensors fill {expected} bytes, got {wire.numel()}")


def _check(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits must be 8 or 9, got {bits}")


def _not_finite(i: int) -> NonFiniteError:
    return NonFiniteError("no power of two is next to NaN or Inf: skip such a step, as `compress` does")


def _message(segments: Segments, bits: int) -> int:
    return sum(natural_nbytes(size, bits) for size in segments.sizes)
