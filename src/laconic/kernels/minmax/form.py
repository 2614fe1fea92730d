"""Layout of a `minmax` message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from laconic.core import arguments
from laconic.core.layout import Segments
from laconic.kernels.bitpack import packed_nbytes

WIDEST = 8  # bits of a level
LONGEST = 1 << 31  # elements of a block
GPU_WIDTHS = (2, 4, 8)  # bits with Triton kernels
GPU_BLOCKS = (32, 4096)  # bounds of block sizes, powers of 2, with Triton kernels


@dataclass(frozen=True)
class MinMaxForm:
    """Bits (1..8) of each tensor's levels, elements per block, and rounding 'nearest' or 'stochastic'."""

    widths: tuple[int, ...]
    block: int = 512
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        arguments.whole("block", self.block, 1, LONGEST)
        arguments.choice("rounding", self.rounding, ("nearest", "stochastic"))
        for width in set(self.widths):
            arguments.whole("width", width, 1, WIDEST)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of the integers alone: equal in every process."""
        return hash((self.widths, self.block))

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    def message_nbytes(self, segments: Segments) -> int:
        """Return the bytes of a message. Raises `ValueError` unless there is one width per tensor."""
        if len(self.widths) != len(segments):
            raise ValueError(f"one width a segment is needed ({len(segments)}), got {len(self.widths)}")
        return _message_nbytes(segments.sizes, self.widths, self.block)


@lru_cache(maxsize=512)
def _message_nbytes(sizes: tuple[int, ...], widths: tuple[int, ...], block: int) -> int:
    return sum(minmax_nbytes(n, width, block) for n, width in zip(sizes, widths, strict=True))


def minmax_nbytes(n: int, width: int, block: int) -> int:
    """Return the bytes of n elements: 8 per block, then levels of `width` bits."""
    return 8 * -(-n // block) + packed_nbytes(n, width)


@dataclass(frozen=True)
class Sizes:
    """Bytes of each message; `end`: one past the last element that they touch."""

    nbytes: tuple[int, ...]
    end: int
    idle: tuple[bool, ...]
    on_gpu: bool


@lru_cache(maxsize=512)
def sizes_of(ranges: tuple[Segments, ...], forms: tuple[MinMaxForm, ...]) -> Sizes:
    if len(forms) != len(ranges) or len({form.block for form in forms}) > 1:
        raise ValueError(f"{len(ranges)} messages take as many forms, all with one block, got {forms}")
    pairs = zip(ranges, forms, strict=True)
    return Sizes(
        tuple(form.message_nbytes(segments) for segments, form in pairs),
        max((segments.end for segments in ranges), default=0),
        tuple(segments.numel == 0 for segments in ranges),
        on_gpu(forms) and any(segments.numel for segments in ranges),
    )


def on_gpu(forms: Sequence[MinMaxForm]) -> bool:
    widths = {width for form in forms for width in form.widths}
    block = forms[0].block if forms else 0
    power = block & (block - 1) == 0 and GPU_BLOCKS[0] <= block <= GPU_BLOCKS[1]
    return len(widths) == 1 and widths <= set(GPU_WIDTHS) and power
