"""Sparse messages with Rice-coded positions on a GPU. Layout: see `codecs.sparse`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels import dispatch
from laconic.kernels.entropy.tables import uploaded
from laconic.kernels.entropy.triton_decode import add_kernel, ones_kernel, places_kernel
from laconic.kernels.entropy.triton_encode import measure_kernel, write_kernel
from laconic.kernels.launch import launch
from laconic.kernels.tiles import table

SEGMENTS, BITS, ENTRIES = 256, 4096, 1024  # per step of a program


def encode(
    x: Tensor, segments: Segments, indices: Tensor, counts: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Encode entries as a message of at most `most` bytes.

    indices: perhaps with unused ones at the end; counts: on the device. Returns the message, values and
    positions, each with unused room; and facts int64 (2,): bytes of the positions, and 1 if indices do not
    ascend: then the rest is invalid.
    """
    device, num, total = x.device, len(segments), indices.numel()
    words = torch.zeros(most // 4 + 2, dtype=torch.int32, device=device)
    pair = num + num % 2  # 16-byte alignment
    highs, facts, places = torch.empty(pair + 2 + total, dtype=torch.int64, device=device).split_with_sizes(
        [pair, 2, total]
    )
    chosen = torch.empty(total, dtype=torch.float32, device=device)
    sizes, starts = table(segments.sizes, device), table(segments.starts, device)
    ranges = (indices, counts, sizes)
    with dispatch.device_of(x):
        launch(measure_kernel, (num,), *ranges, highs, num, SEGMENTS, ENTRIES, num_warps=4)
        made = (words, facts, chosen, places, SEGMENTS, ENTRIES)
        launch(write_kernel, (num,), x, *ranges, starts, highs, num, *made)
    return words.view(torch.uint8), chosen, places, facts


def add_(wires: Sequence[Tensor], segments: Segments, out: Tensor, alpha: float) -> Tensor:
    """Add alpha * N messages, in order, unless one is damaged; return int32 (N,) flags.

    Together they have less than 2^28 bytes.
    """
    device, num, messages = out.device, len(segments), len(wires)
    base, head = wires[0], 4 * (len(segments) + 1)
    first = base.data_ptr()
    where = np.empty((3, messages), dtype=np.int64)
    rooms = 0
    for i, wire in enumerate(wires):
        length = wire.numel()
        where[:, i] = wire.data_ptr() - first, length, rooms
        rooms += (length - head) >> 2
    of_messages = uploaded(where.reshape(-1), device)
    parts = [messages * num * 4, messages + -messages % 4, 2 * rooms]  # 16-byte alignment
    scratch = torch.empty(sum(parts), dtype=torch.int32, device=device)
    rows, flags, ends = scratch.split_with_sizes(parts)
    facts = torch.empty(2 * messages, dtype=torch.int64, device=device)
    sizes, starts = table(segments.sizes, device), table(segments.starts, device)
    shared = num, messages, rooms, rows, facts, flags, ends
    with dispatch.device_of(out):
        launch(ones_kernel, (messages,), base, of_messages, sizes, *shared, SEGMENTS, BITS)
        launch(places_kernel, (messages, num), base, of_messages, sizes, *shared, ENTRIES, num_warps=4)
        launch(
            add_kernel,
            (num,),
            base,
            of_messages,
            starts,
            *shared,
            out,
            alpha,
            1 << (messages - 1).bit_length(),
            ENTRIES,
            num_warps=4,
        )
    return flags[:messages]
