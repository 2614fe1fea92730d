"""Indices of max pooling as positions in their windows: 1 to 8 bits instead of 64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic import kernels


def pair(value: Any) -> tuple[int, int]:
    numbers = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return int(numbers[0]), int(numbers[-1])


@dataclass(frozen=True)
class Windows:
    """Windows of a two-dimensional pooling over images."""

    width: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @classmethod
    def of(cls, x: Tensor, kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1) -> Windows:
        stride = kernel if stride is None or stride in ([], ()) else stride
        return cls(x.shape[-1], pair(kernel), pair(stride), pair(padding), pair(dilation))

    @property
    def bits(self) -> int:
        return max(1, (self.kernel[0] * self.kernel[1] - 1).bit_length())

    def starts(self, like: Tensor) -> tuple[Tensor, Tensor]:
        h, w = like.shape[-2:]
        rows = torch.arange(h, device=like.device, dtype=torch.int64) * self.stride[0] - self.padding[0]
        columns = torch.arange(w, device=like.device, dtype=torch.int64) * self.stride[1] - self.padding[1]
        return rows[:, None], columns[None, :]


@dataclass(frozen=True)
class PoolIndices:
    codes: Tensor
    shape: torch.Size
    windows: Windows

    @classmethod
    def of(cls, indices: Tensor, windows: Windows) -> PoolIndices:
        rows, columns = windows.starts(indices)
        row = (indices // windows.width - rows) // windows.dilation[0]
        column = (indices % windows.width - columns) // windows.dilation[1]
        codes = (row * windows.kernel[1] + column).to(torch.int32)
        return cls(kernels.pack_bits(codes.flatten(), windows.bits), indices.shape, windows)

    @property
    def nbytes(self) -> int:
        return self.codes.numel()

    def unpack(self) -> Tensor:
        windows = self.windows
        codes = kernels.unpack_bits(self.codes, windows.bits, self.shape.numel()).long().view(self.shape)
        rows, columns = windows.starts(codes)
        row = rows + codes // windows.kernel[1] * windows.dilation[0]
        column = columns + codes % windows.kernel[1] * windows.dilation[1]
        return row * windows.width + column
