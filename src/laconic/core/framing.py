"""Conversion between bytes and numbers: the fixed parts of a wire, little-endian.

On a big-endian machine its import raises `ImportError`, as kernels use native byte order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.core.turn import MASK

if sys.byteorder != "little":
    raise ImportError(f"wires are little-endian, and this machine is {sys.byteorder}-endian: use another")

CPU = torch.device("cpu")
SIGN = 1 << 63
MASK32 = (1 << 32) - 1


def as_bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8) if values.numel() else values.new_empty(0, dtype=torch.uint8)


def as_numbers(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of wire uint8 (m,); copied only if not aligned."""
    aligned = wire.storage_offset() % dtype.itemsize == 0 and wire.is_contiguous()
    return wire.view(dtype) if aligned else wire.clone(memory_format=torch.contiguous_format).view(dtype)


def sent_to(values: Tensor, device: torch.device | None) -> Tensor:
    if device is None or device.type == "cpu":
        return values
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Move tensors in one copy."""
    if all(tensor.device == device for tensor in tensors):
        return [*tensors]
    joined = torch.cat([*tensors])
    joined = joined.cpu() if device.type == "cpu" else sent_to(joined, device)
    return [*torch.split(joined, [tensor.numel() for tensor in tensors])]


def consecutive(wires: Sequence[Tensor]) -> Tensor:
    """Concatenate wires to uint8 (sum of m,), without a copy if adjacent in memory.

    >>> room = torch.arange(5, dtype=torch.uint8)
    >>> consecutive(room.split([2, 3])).data_ptr() == room.data_ptr()
    True
    """
    first, end = wires[0], wires[0].data_ptr()
    base = first.untyped_storage().data_ptr()
    for wire in wires:
        if wire.data_ptr() != end or wire.untyped_storage().data_ptr() != base or not wire.is_contiguous():
            return torch.cat([*wires])
        end += wire.numel()
    return first.as_strided((end - first.data_ptr(),), (1,))


def read_bytes(wire: Tensor, nbytes: int, what: str) -> tuple[Tensor, Tensor]:
    if wire.numel() < nbytes:
        raise WireError(f"{what} fill {nbytes} bytes, but {wire.numel()} are left")
    return wire[:nbytes], wire[nbytes:]


def unsigned(wire: Tensor) -> Tensor:
    return as_numbers(wire.cpu(), torch.int32).to(torch.int64) & MASK32


def check_heads(wires: Sequence[Tensor], count: int) -> None:
    """Raise `WireError`, with its number, for a wire shorter than `count` uint32."""
    for number, wire in enumerate(wires):
        if wire.numel() < 4 * count:
            text = (
                f"counts and the length of the positions fill {4 * count} bytes, but {wire.numel()} are left"
            )
            raise numbered(text, number, wires)


def numbered(text: str, number: int, messages: Sequence[object]) -> WireError:
    error = WireError(text)
    error.message = number if len(messages) > 1 else None
    return error


def read_positions(wire: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes of positions, without their length uint32, and the rest."""
    head, rest = read_bytes(wire, 4, "the length of the positions")
    return read_bytes(rest, int(unsigned(head)), "the positions")


def split_sparse(
    wires: Sequence[Tensor], segments: Segments
) -> tuple[NDArray[np.int64], list[Tensor], list[Tensor]]:
    """Split N untrusted sparse messages: counts int64 (N, s), bytes of positions and of values."""
    count = len(segments) + 1
    check_heads(wires, count)
    each = [wire[: 4 * count] for wire in wires]
    read = (each[0] if len(each) == 1 else torch.stack(each)).cpu().contiguous().numpy()  # in one copy
    heads: NDArray[np.int64] = read.view(np.uint32).astype(np.int64).reshape(len(wires), count)
    counts, lengths = np.ascontiguousarray(heads[:, :-1]), heads[:, -1].tolist()
    for number in np.flatnonzero((counts > segments.sizes_tensor.numpy()).any(axis=1))[:1].tolist():
        raise numbered("a count is larger than its tensor", number, wires)
    coded, rest = [], []
    for number, (wire, length) in enumerate(zip(wires, lengths, strict=True)):
        left = wire.numel() - 4 * count - length
        if left < 0:
            text = f"the positions fill {length} bytes, but {left + length} are left"
            raise numbered(text, number, wires)
        _, positions, values = wire.split_with_sizes([4 * count, length, left])
        coded.append(positions)
        rest.append(values)
    return counts, coded, rest


def counts_bytes(counts: Tensor) -> Tensor:
    """Return counts int64 (s,) as uint32 bytes on the CPU. Raises `ValueError` above 2^32 - 1."""
    if counts.numel() and int(counts.numpy().max()) >> 32:
        raise ValueError(
            f"one message holds at most {MASK32} entries, and bytes of positions, got {int(counts.max())}:"
            " choose a smaller density, or smaller buckets (bucket_cap_mb)"
        )
    return torch.from_numpy(counts.numpy().astype(np.uint32).view(np.uint8))


def read_counts(wire: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Return one count per segment, int64 (s,), at most its size and on the CPU; and the rest."""
    head, rest = read_bytes(wire, 4 * len(segments), "the counts")
    counts = unsigned(head)
    if (counts.numpy() > segments.sizes_tensor.numpy()).any():
        raise WireError("a count is larger than its tensor")
    return counts, rest


def keys_bytes(keys: Sequence[int]) -> Tensor:
    signed = [(key + SIGN & MASK) - SIGN for key in keys]
    return as_bytes(torch.tensor(signed, dtype=torch.int64, device="cpu"))


def read_keys(wire: Tensor, segments: Segments) -> tuple[list[int], Tensor]:
    head, rest = read_bytes(wire, 8 * len(segments), "the keys")
    return [key & MASK for key in as_numbers(head.cpu(), torch.int64).tolist()], rest
