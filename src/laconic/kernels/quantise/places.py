"""Positions of elements, blocks and bytes of all tensors of a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from laconic.core.framing import sent_to
from laconic.core.layout import Segments
from laconic.kernels import checks
from laconic.kernels.quantise.form import Form
from laconic.kernels.tiles import table

GROUP = 16  # elements per counter; their codes fill whole bytes
ELEMENTS = {"cpu": 1 << 16}  # that fit in a CPU's cache
MANY = 1 << 23


@dataclass(frozen=True)
class Places:
    """Tables int64 (s,).

    Tensors are padded to whole units. `body_end` is one past the codes' last byte. `tails` (t,) are partly
    used last bytes, `tail_limits` one more than their largest valid values.
    """

    unit: int
    unit_nbytes: int
    units: int
    blocks: int
    nbytes: int
    starts: Tensor
    sizes: Tensor
    unit_counts: Tensor
    first_unit: Tensor
    first_element: Tensor
    first_block: Tensor
    block_counts: Tensor
    head: Tensor
    body: Tensor
    body_end: Tensor
    tails: Tensor
    tail_limits: Tensor


@lru_cache(maxsize=256)
def places(segments: Segments, form: Form, device: torch.device) -> Places:
    unit = GROUP * (5 if form.base3 else 1)
    units = [-(-n // unit) for n in segments.sizes]
    blocks = [form.blocks_in(n) for n in segments.sizes]
    nbytes = [4 * b + form.codes_nbytes(n) for b, n in zip(blocks, segments.sizes, strict=True)]
    head = sums(nbytes)
    body = [at + 4 * b for at, b in zip(head, blocks, strict=True)]
    ends = [at + size for at, size in zip(head, nbytes, strict=True)]
    limits = [3 ** (n % 5) if form.base3 else 1 << n * form.bits % 8 for n in segments.sizes]
    tails = [i for i, limit in enumerate(limits) if limit > 1]

    def on(values: Sequence[int]) -> Tensor:
        return table(tuple(values), device)

    return Places(
        unit=unit,
        unit_nbytes=unit // 5 if form.base3 else unit * form.bits // 8,
        units=sum(units),
        blocks=sum(blocks),
        nbytes=sum(nbytes),
        starts=on(segments.starts),
        sizes=on(segments.sizes),
        unit_counts=on(units),
        first_unit=on(sums(units)),
        first_element=on(sums(segments.sizes)),
        first_block=on(sums(blocks)),
        block_counts=on(blocks),
        head=on(head),
        body=on(body),
        body_end=on(ends),
        tails=on([ends[i] - 1 for i in tails]),
        tail_limits=on([limits[i] for i in tails]),
    )


def sums(counts: Sequence[int]) -> list[int]:
    return [total - count for total, count in zip(np.cumsum([*counts]).tolist(), counts, strict=True)]


def chunks(total: int, each: int, device: torch.device) -> Iterator[tuple[int, int]]:
    step = max(1, ELEMENTS.get(device.type, MANY) // each)
    return ((first, min(first + step, total)) for first in range(0, total, step))


def owners(first: Tensor, counts: Tensor, begin: int, end: int) -> Tensor:
    """Return the tensor of each item in [begin, end), int64; tensor i has `counts[i]` from `first[i]` on."""
    if len(counts) == 1:
        return torch.zeros(end - begin, dtype=torch.int64, device=first.device)
    inside = (first + counts).clamp(max=end) - first.clamp(min=begin)
    numbers = torch.arange(len(counts), dtype=torch.int64, device=first.device)
    return numbers.repeat_interleave(inside.clamp(min=0), output_size=end - begin)


def device_keys(keys: Sequence[int], segments: Segments, device: torch.device) -> Tensor:
    return sent_to(checks.keys64(keys, len(segments)), device)


def key_words(keys: Sequence[int], segments: Segments, device: torch.device) -> Tensor:
    whole = device_keys(keys, segments, device)
    return torch.stack([whole & 0xFFFFFFFF, (whole >> 32) & 0xFFFFFFFF])
