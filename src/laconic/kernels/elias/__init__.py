"""Elias omega codes of positive integers.

Elias 1975, "Universal codeword sets and representations of the integers".
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.errors import WireError
from laconic.kernels import checks, dispatch
from laconic.kernels.elias import reference


def elias_encode(values: Tensor) -> Tensor:
    """Encode values int32 (k,) >= 1 to uint8 (m,), filling each byte from its highest bit.

    >>> [format(byte, "08b") for byte in elias_encode(torch.tensor([1, 2, 4], dtype=torch.int32)).tolist()]
    ['01001010', '00000000']
    """
    checks.flat("values", values, torch.int32)
    if (native := dispatch.native(values)) is not None:
        bits = native.elias_bits(values)
        if bits >= 0:
            wire = torch.empty((bits + 7) // 8 + 8, dtype=torch.uint8, device="cpu")
            native.elias_encode(values, wire)
            return wire[:-8]
    elif not values.numel() or int(values.min()) > 0:
        return reference.elias_encode(values)
    raise ValueError(f"Elias codes start at 1: add one to what can be 0, got {int(values.min())}")


def elias_decode(wire: Tensor, count: int) -> Tensor:
    """Decode `elias_encode` to int32 (count,). Raises `WireError` for any other bytes.

    >>> elias_decode(torch.tensor([0b01001010, 0], dtype=torch.uint8), 3).tolist()
    [1, 2, 4]
    """
    checks.flat("wire", wire, torch.uint8)
    if not 0 <= count <= 8 * wire.numel():
        raise WireError(f"{wire.numel()} bytes hold 0 to {8 * wire.numel()} codes, not {count}")
    if (native := dispatch.native(wire)) is not None:
        values = torch.empty(count, dtype=torch.int32, device="cpu")
        native.elias_decode(wire, values)
        return values
    return reference.elias_decode(wire, count)


def elias_length(value: int) -> int:
    """Return the bits of the code of a value >= 1.

    >>> [elias_length(value) for value in (1, 2, 4, 8, 16, 2**31 - 1)]
    [1, 3, 6, 7, 11, 42]
    """
    bits = 1
    while value > 1:
        bits += value.bit_length()
        value = value.bit_length() - 1
    return bits
