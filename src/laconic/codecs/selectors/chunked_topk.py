"""ChunkedTopK: the largest entries of every short chunk, so that every part of a tensor is sent.

Chunks of 64 by 64 in DeMo (Peng et al. 2024, arXiv:2411.19870) and SparseLoCo (Sarfi et al. 2025,
arXiv:2508.15706); here runs of the flat tensor, as wires have no shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.core import arguments
from laconic.core.layout import Segments
from laconic.core.selector import DensitySelector, counts_per_segment, kept
from laconic.core.spec import Status


@dataclass(frozen=True, repr=False)
class ChunkedTopK(DensitySelector):
    """The ceil(density * m) largest |x_i| of each chunk of m = `chunk` entries, exactly; the last is shorter.

    The lower position first among equals. Error: |x - x_S|^2 <= (1 - k / m) |x|^2 in each chunk.

    >>> ChunkedTopK(density=0.5, chunk=2).select(torch.tensor([9.0, 8.0, 0.1, -0.2])).tolist()
    [0, 3]
    """

    chunk: int = 4096

    paper: ClassVar[str] = "Sarfi et al. 2025, arXiv:2508.15706"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = (
        "chunked_topk(density=0.015625)",
        "chunked_topk(density=0.1, chunk=256)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.whole("chunked_topk: chunk", self.chunk, 1)

    def select_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> tuple[Tensor, Tensor]:
        kernels.addressable(segments.sizes)  # `topk` checks only the chunks
        chunks, of, before = cut(segments, self.chunk)
        indices, counts = kernels.topk(x, chunks, counts_per_segment(self.density, chunks))
        if not x.is_cpu:
            before = on_device(segments, self.chunk, x.device)
            on = counts.to(x.device, non_blocking=True)
            indices = indices + before.repeat_interleave(on, output_size=len(indices))
        else:
            indices = indices + before.repeat_interleave(counts).to(indices)
        return indices, torch.zeros(len(segments), dtype=torch.int64, device="cpu").index_add_(0, of, counts)

    def max_count(self, n: int) -> int:
        return n // self.chunk * kept(self.density, self.chunk) + kept(self.density, n % self.chunk)

    def omega(self, n: int) -> float:
        sizes = {min(n, self.chunk), n % self.chunk} - {0}
        return max((1 - kept(self.density, size) / size for size in sizes), default=0.0)


@lru_cache(maxsize=256)
def cut(segments: Segments, chunk: int) -> tuple[Segments, Tensor, Tensor]:
    """Return chunks, and int64 (c,) each: a chunk's segment, and its offset there.

    >>> cut(Segments((0, 10), (5, 2)), 4)[0]
    Segments(starts=(0, 4, 10), sizes=(4, 1, 2))
    """
    rows = [
        (start + before, min(chunk, size - before), i, before)
        for i, (start, size) in enumerate(segments)
        for before in range(0, size, chunk)
    ]
    starts, sizes, of, before = zip(*rows, strict=True) if rows else ((), (), (), ())
    chunks = Segments(starts, sizes)
    return (
        chunks,
        torch.tensor(of, dtype=torch.int64, device="cpu"),
        torch.tensor(before, dtype=torch.int64, device="cpu"),
    )


@lru_cache(maxsize=64)
def on_device(segments: Segments, chunk: int, device: torch.device) -> Tensor:
    return cut(segments, chunk)[2].to(device=device, dtype=torch.int32)
