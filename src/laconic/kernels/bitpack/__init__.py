"""Packing of small integers in a fixed number of bits."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.deferred import check
from laconic.core.errors import WireError
from laconic.kernels import checks, dispatch
from laconic.kernels.bitpack import reference


def packed_nbytes(n: int, bits: int) -> int:
    """Return ceil(n * bits / 8)."""
    return (n * bits + 7) // 8


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack the low `bits` (1..32) of codes int32 (n,) to uint8 (ceil(n * bits / 8),).

    Code i lies in bits [i * bits, (i + 1) * bits) of the stream, where bit j is bit j % 8 of byte j // 8.

    >>> pack_bits(torch.tensor([1, 2, 3], dtype=torch.int32), bits=4).tolist()
    [33, 3]
    """
    _check_bits(bits)
    checks.flat("codes", codes, torch.int32)
    if (native := dispatch.native(codes)) is not None:
        wire = torch.empty(packed_nbytes(codes.numel(), bits), dtype=torch.uint8, device="cpu")
        native.pack_bits(codes, bits, wire)
        return wire
    return reference.pack_bits(codes, bits)


def unpack_bits(wire: Tensor, bits: int, n: int) -> Tensor:
    """Unpack `pack_bits` to int32 (n,); codes of 32 bits can be negative.

    Raises `WireError` for other lengths and nonzero padding.

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
    used = n * bits % 8
    if used:
        check((wire[-1:] >> used).to(torch.int32), lambda _: _padded(n, bits))
    if (native := dispatch.native(wire)) is not None:
        codes = torch.empty(n, dtype=torch.int32, device="cpu")
        native.unpack_bits(wire, bits, codes)
        return codes
    return reference.unpack_bits(wire, bits, n)


def ternary_nbytes(n: int) -> int:
    """Return ceil(n / 5): 1.6 bits per level."""
    return (n + 4) // 5


def pack_ternary(levels: Tensor) -> Tensor:
    """Pack levels -1, 0, 1 int32 (n,) to uint8 (ceil(n / 5),), five base-3 digits per byte.

    Digits 0, 1, 2 mean 0, 1, -1; the first level is the lowest digit, padding is zero. Raises `ValueError`
    for any other level.

    >>> pack_ternary(torch.tensor([1, -1, 0, 0, 1, -1], dtype=torch.int32)).tolist()
    [88, 2]
    """
    checks.flat("levels", levels, torch.int32)
    if (native := dispatch.native(levels)) is not None:
        wire = torch.empty(ternary_nbytes(levels.numel()), dtype=torch.uint8, device="cpu")
        if native.pack_ternary(levels, wire):
            return wire
    elif reference.is_ternary(levels):
        return reference.pack_ternary(levels)
    raise ValueError(
        f"levels must be -1, 0 or 1, got {int(levels.min())} to {int(levels.max())}: use pack_bits"
    )


def unpack_ternary(wire: Tensor, n: int) -> Tensor:
    """Unpack `pack_ternary` to int32 (n,). Raises `WireError` for other bytes.

    >>> unpack_ternary(torch.tensor([88, 2], dtype=torch.uint8), n=6).tolist()
    [1, -1, 0, 0, 1, -1]
    """
    checks.flat("wire", wire, torch.uint8)
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    if wire.numel() != ternary_nbytes(n):
        raise WireError(f"{n} levels fill {ternary_nbytes(n)} bytes in base 3, got {wire.numel()}")
    if (native := dispatch.native(wire)) is not None:
        levels = torch.empty(n, dtype=torch.int32, device="cpu")
        native.unpack_ternary(wire, levels)
        return levels
    return reference.unpack_ternary(wire, n)


def _padded(n: int, bits: int) -> WireError:
    return WireError(f"the last {8 - n * bits % 8} bits of {n} codes of {bits} bits must be zero")


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 32:
        raise ValueError(f"bits must be in 1..32, got {bits}")
