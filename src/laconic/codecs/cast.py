"""Cast: every element as a 16-bit float."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.errors import WireError
from laconic.core.framing import as_bytes, as_numbers
from laconic.core.layout import Segments
from laconic.core.spec import Status

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
BLOCK = 1 << 16  # elements
EXPONENT = {"fp16": 0x7C00, "bf16": 0x7F80}  # all set only in NaN and Inf
UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8}  # half the distance from 1 to the next number


@dataclass(frozen=True, repr=False)
class Cast(Codec):
    """Rounds to 16-bit floats, to nearest, ties to even; deterministic, hence biased.

        fp16  [sign | exponent 5 | mantissa 10]   normal from 6.1e-5 to 65504
        bf16  [sign | exponent 8 | mantissa 7]    normal from 1.2e-38 to 3.39e38

    Wire: `dtype` (n,), little-endian: 2 n bytes; NaN and Inf are refused. Error: at most u |x_i| for zero and
    elements in the normal range, u = 2^-11 (fp16) or 2^-8 (bf16): omega = u^2. Smaller elements have an error
    of at most m = 2^-25 (fp16) or 2^-134 (bf16), and those up to m become zero; larger ones and infinities
    become the largest finite number. No error exceeds its element.

    >>> Cast("fp16").decode(Cast("fp16").encode(torch.tensor([1.0, 0.1, 1e6])), 3).tolist()
    [1.0, 0.0999755859375, 65504.0]
    """

    status: ClassVar[Status] = "own"

    dtype: str

    unbiased: ClassVar[bool] = False
    examples: ClassVar[tuple[str, ...]] = ("cast(dtype='fp16')", "cast(dtype='bf16')")

    def __post_init__(self) -> None:
        arguments.choice("cast: dtype", self.dtype, tuple(HALVES))

    @property
    def normal(self) -> tuple[float, float]:
        info = torch.finfo(HALVES[self.dtype])
        return info.smallest_normal, info.max

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        half = HALVES[self.dtype]
        most = torch.finfo(half).max
        wire = x.new_empty(segments.numel, dtype=half)
        for part, to in blocks(x, wire, segments):
            to.copy_(part.clamp(-most, most))
        return as_bytes(wire)

    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        self.check_size(wire, segments)
        packed, exponent = as_numbers(wire, HALVES[self.dtype]), EXPONENT[self.dtype]
        for part in torch.split(packed.view(torch.int16), BLOCK if wire.is_cpu else max(1, segments.numel)):
            if part.numel() and int((part & exponent).amax()) == exponent:
                raise WireError(f"{self!r}: a wire holds NaN or Inf; only finite numbers are sent")
        for to, part in blocks(out, packed, segments):
            to.add_(part.to(torch.float32), alpha=alpha)
        return out

    def nbytes(self, n: int) -> int:
        return 2 * n

    def omega(self, n: int) -> float:
        return UNIT[self.dtype] ** 2


def blocks(x: Tensor, packed: Tensor, segments: Segments) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ranges of x with their places in `packed`, cut to fit in a CPU's cache."""
    longest = BLOCK if x.is_cpu else max(1, segments.numel)
    runs = segments.joined
    for view, place in zip(runs.views(x), runs.packed.views(packed), strict=True):
        yield from zip(torch.split(view, longest), torch.split(place, longest), strict=True)
