"""Small integers in as many bits as they need, one after the other, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.errors import WireError
from laconic.kernels import checks, dispatch
from laconic.kernels.bitpack import reference


def packed_nbytes(n: int, bits: int) -> int:
    """Bytes of n codes of this many bits: ceil(n * bits / 8)."""
    return (n * bits + 7) // 8


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes int32 (n,) as wire uint8 (ceil(n * bits / 8),); the low `bits` (1..32) of each code travel.

    Code i lies in bits [i * bits, (i + 1) * bits) of the stream, where bit j is bit j % 8 of byte j // 8.

    >>> pack_bits(torch.tensor([1, 2, 3], dtype=torch.int32), bits=4).tolist()
    [33, 3]
    """
    _check_bits(bits)
    checks.flat("codes", codes, torch.int32)
    if (native := dispatch.native(codes)) is not None:
        wire = torch.empty(packed_nbytes(codes.numel(), bits), dtype=torch.uint8)
        native.pack_bits(codes, bits, wire)
        return wire
    return reference.pack_bits(codes, bits)


def unpack_bits(wire: Tensor, bits: int, n: int) -> Tensor:
    """Codes int32 (n,) of a wire that `pack_bits` made; codes of 32 bits can be negative.

    Raises `WireError` unless the wire has ceil(n * bits / 8) bytes and the bits after the last code are zero.

    >>> unpack_bits(torch.tensor([33, 3], dtype=torch.uint8), bits=4, n=3).tolist()
    [1, 2, 3]
    """
    _check_bits(bits)
    checks.flat("wire", wire, torch.uint8)
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    expected = packed_nbytes(n, bits)
    if wire.numel() != expected:
        raise WireError(f"{n} codes of {bits} bits fill {expected} bytes, got {wire.numel()}")
    used = n * bits % 8  # of the last byte
    if used and int(wire[-1]) >> used:
        raise WireError(f"the last {8 - used} bits of {n} codes of {bits} bits must be zero")
    if (native := dispatch.native(wire)) is not None:
        codes = torch.empty(n, dtype=torch.int32)
        native.unpack_bits(wire, bits, codes)
        return codes
    return reference.unpack_bits(wire, bits, n)


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 32:
        raise ValueError(f"bits must be in 1..32, got {bits}")
