"""Selector: the entries of a tensor to send. IndexCoding: the encoding of their positions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.core import arguments
from laconic.core.errors import WireError
from laconic.core.framing import CPU, moved, sent_to
from laconic.core.layout import Segments
from laconic.core.spec import Spec

OF_CODECS = ("encode", "decode", "decode_add_", "nbytes", "fixed_size", "unbiased")


@dataclass(frozen=True)
class Padded:
    """Selected entries that the host has not counted yet.

    indices: int32, the selected ones, then padding. totals: int64 (2, s), entries of each segment that reach
    its threshold, and selected ones. The indices are invalid if more than `room` reach it.
    """

    indices: Tensor
    totals: Tensor
    room: int


class Selector(Spec):
    """Choice of at most `max_count(n)` nonzero entries of x float32 (n,), by ascending position.

    `replayable`: positions depend only on (key, n), and a wire contains the 8-byte key instead.
    """

    replayable: ClassVar[bool] = False

    if not TYPE_CHECKING:  # so that type checkers report missing attributes

        def __getattr__(self, name: str) -> Any:
            if name in OF_CODECS:
                raise AttributeError(
                    f"{self!r} is a selector and has no {name}: the codec that sends its entries is"
                    f" sparse({self!r})"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @abstractmethod
    def select_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Choose entries of these ranges of a flat buffer.

        Args:
            x: float32 (n,), unchanged. A replayable selector reads its device only.
            segments: the ranges of x, one per tensor.
            keys: one key in 0..2^64 - 1 per segment, for random selectors.

        Returns:
            Positions int32 (k,), counted from the start of their segment; and the counts per segment, int64
            (s,) on the CPU.
        """

    def padded(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> tuple[Padded, Tensor] | None:
        """Choose like `select_segments`, without waiting for a GPU, or return None.

        Also returns the maximum count per segment, int64 (s,) on the CPU.
        """
        return None

    @abstractmethod
    def max_count(self, n: int) -> int:
        """Return the maximum number of chosen entries."""

    @abstractmethod
    def omega(self, n: int) -> float:
        """Return the least known omega <= 1 with |x - x_S|^2 <= omega * |x|^2."""

    def absolute_error(self, n: int) -> float | None:
        """Return a bound on |x - x_S|^2 for every x of n elements, or None."""
        return None

    def at(self, step: int) -> Selector:
        """Return the selector of this step: itself without a schedule, which ends at `warm_at`."""
        return self

    def select(self, x: Tensor, key: int = 0) -> Tensor:
        """Return the positions int32 (k,), ascending."""
        return self.select_segments(x, Segments.whole(x.numel()), (key,))[0]


@dataclass(frozen=True, repr=False)
class DensitySelector(Selector):
    """Base of selectors of k = ceil(density * n) entries; by default omega = 1 - k / n."""

    density: float

    def __post_init__(self) -> None:
        check_density(self.density)

    def max_count(self, n: int) -> int:
        return kept(self.density, n)

    def omega(self, n: int) -> float:
        return 1 - self.max_count(n) / n if n else 0.0


class IndexCoding(Spec):
    """Coding of ascending positions as bytes, without counts and sizes."""

    @abstractmethod
    def encode(self, indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
        """Encode ascending positions as a wire uint8 (m,).

        Args:
            indices: int32 (k,), each counted from the start of its segment.
            counts: indices per segment, int64 (s,) on the CPU.
            segments: only the sizes matter.
        """

    @abstractmethod
    def decode(self, wire: Tensor, counts: Tensor, segments: Segments) -> Tensor:
        """Decode a wire of `encode` to indices int32 (k,).

        Raises `WireError` unless the positions ascend in their segments and fill the wire.
        """

    def positions(
        self, wires: Sequence[Tensor], counts: NDArray[np.int64], segments: Segments
    ) -> tuple[Tensor, int, Tensor]:
        """Decode the wires of N messages, with the same segments, to positions in the flat buffer.

        Args:
            wires: uint8 (m_i,) for each message, not trusted.
            counts: int64 (N, s), at most the segment's size.
            segments: the ranges.

        Returns:
            Positions int64, by message; the number of padding elements between messages; and whether a
            message is damaged, bool () on the device: then positions are undefined.

        Raises:
            WireError: for a damaged message, with its number, if the host detects it.
        """
        parts, device = [], wires[0].device
        for number, (wire, row) in enumerate(zip(moved(wires, CPU), counts, strict=True)):
            given = torch.from_numpy(row)
            try:
                indices = self.decode(wire, given, segments)
            except WireError as error:
                error.message = number if len(wires) > 1 else None
                raise
            parts.append(indices + segments.starts_tensor.repeat_interleave(given))
        return sent_to(torch.cat(parts), device), 0, torch.zeros((), dtype=torch.bool, device=device)

    @abstractmethod
    def nbytes(self, k: int, n: int) -> int:
        """Return the maximum bytes of k positions among n."""


def check_density(density: float) -> None:
    arguments.number("density", density, above=0, most=1)


def kept(density: float, n: int) -> int:
    """Return ceil(density * n), at least 1 for a nonempty tensor.

    >>> kept(0.001, 2500), kept(0.1, 30), kept(1e-12, 1), kept(0.5, 0)
    (3, 3, 1, 0)
    """
    return min(n, max(1, math.ceil(density * n - 1e-9)))


@lru_cache(maxsize=1024)
def counts_per_segment(density: float, segments: Segments) -> Tensor:
    """Return `kept(density, size)` per segment, int64 (s,). Shared: do not modify."""
    return torch.tensor([kept(density, size) for size in segments.sizes], dtype=torch.int64, device="cpu")
