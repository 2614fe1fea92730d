"""Raw32: each position in 32 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic import kernels
from laconic.core.errors import WireError
from laconic.core.framing import as_bytes, as_numbers, numbered
from laconic.core.layout import Segments
from laconic.core.selector import IndexCoding
from laconic.core.spec import Status


@dataclass(frozen=True, repr=False)
class Raw32(IndexCoding):
    """Wire: int32 (K,), little-endian, each counted from the start of its tensor: 4 K bytes.

    >>> indices = torch.tensor([3, 256], dtype=torch.int32)
    >>> Raw32().encode(indices, torch.tensor([2]), Segments.whole(999)).tolist()
    [3, 0, 0, 0, 0, 1, 0, 0]
    """

    status: ClassVar[Status] = "own"

    def encode(self, indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
        return as_bytes(indices.clone())

    def decode(self, wire: Tensor, counts: Tensor, segments: Segments) -> Tensor:
        total = int(counts.sum())
        if wire.numel() != 4 * total:
            raise WireError(f"raw32: {total} positions fill {4 * total} bytes, got {wire.numel()}")
        indices = as_numbers(wire, torch.int32)
        if not kernels.ascending(indices, counts, segments):
            raise WireError("raw32: positions must ascend inside their tensors")
        return indices

    def positions(
        self, wires: Sequence[Tensor], counts: NDArray[np.int64], segments: Segments
    ) -> tuple[Tensor, int, Tensor]:
        for number, (wire, total) in enumerate(zip(wires, counts.sum(axis=1).tolist(), strict=True)):
            if wire.numel() != 4 * total:
                text = f"raw32: {total} positions fill {4 * total} bytes, got {wire.numel()}"
                raise numbered(text, number, wires)
        indices = as_numbers(wires[0] if len(wires) == 1 else torch.cat(list(wires)), torch.int32)
        wrong = kernels.disorder(indices, counts, segments)
        many = Segments(segments.starts * len(wires), segments.sizes * len(wires))
        return kernels.flat_positions(indices, torch.from_numpy(counts.reshape(-1)), many), 0, wrong

    def nbytes(self, k: int, n: int) -> int:
        return 4 * min(k, n)
