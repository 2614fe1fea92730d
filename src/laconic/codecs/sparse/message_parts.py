"""Parts of sparse messages: counts, coded positions and values, read from wires that are not trusted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.codecs.dense import Dense
from laconic.core.codec import Codec
from laconic.core.errors import WireError
from laconic.core.framing import as_numbers, numbered, read_heads
from laconic.core.layout import Segments

HEAD = "counts and the length of the positions"


def split(
    wires: Sequence[Tensor], segments: Segments
) -> tuple[NDArray[np.int64], list[Tensor], list[Tensor]]:
    """Return the counts int64 (N, s) and the bytes of positions and of values of N messages, none trusted."""
    heads = read_heads(wires, len(segments) + 1, HEAD)
    counts, lengths = np.ascontiguousarray(heads[:, :-1]), heads[:, -1].tolist()
    for number in np.flatnonzero((counts > segments.sizes_tensor.numpy()).any(axis=1))[:1].tolist():
        raise numbered("a count is larger than its tensor", number, wires)
    coded, rest = [], []
    for number, (wire, length) in enumerate(zip(wires, lengths, strict=True)):
        left = wire.numel() - 4 * heads.shape[1] - length
        if left < 0:
            text = f"the positions fill {length} bytes, but {left + length} are left"
            raise numbered(text, number, wires)
        _, positions, values = wire.split_with_sizes([4 * heads.shape[1], length, left])
        coded.append(positions)
        rest.append(values)
    return counts, coded, rest


def read_values(
    codec: Codec, rest: Sequence[Tensor], counts: NDArray[np.int64], totals: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the values float32 (K,) of all messages, and whether one is not finite, bool ()."""
    device = rest[0].device
    if isinstance(codec, Dense):
        for number, (wire, total) in enumerate(zip(rest, totals, strict=True)):
            if wire.numel() != 4 * total:
                text = f"{codec!r}: {total} values fill {4 * total} bytes, got {wire.numel()}"
                raise numbered(text, number, rest)
        values = as_numbers(rest[0] if len(rest) == 1 else torch.cat(list(rest)), torch.float32)
        return values, (values - values).any()  # NaN of NaN and of Inf, which counts as true
    values = torch.zeros(sum(totals), dtype=torch.float32, device=device)
    at = 0
    for number, (wire, row, total) in enumerate(zip(rest, counts, totals, strict=True)):
        units = Segments.consecutive(row.tolist())
        try:
            codec.decode_segments_add_(wire, units, values[at : at + total])
        except WireError as error:
            error.message = number if len(rest) > 1 else None
            raise
        at += total
    return values, torch.zeros((), dtype=torch.bool, device=device)
