"""Min-max: evenly spaced values between the least and the greatest element of each short block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, get_args

from torch import Tensor

from laconic import kernels
from laconic.codecs.quantiser import longest
from laconic.core import arguments
from laconic.core.codec import LARGE, NORMAL, Codec
from laconic.core.layout import Layout, Segments
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.kernels.minmax import FARTHEST, LONGEST, WIDEST, MinMaxForm

Rounding = Literal["nearest", "stochastic"]
ROUNDING = (1 + 2.0**-10, 2.0**-24)  # factor and term of float32 rounding, see the kernel's README


@dataclass(frozen=True, repr=False)
class MinMax(Codec):
    """The quantiser of CGX (Markov et al. 2022, arXiv:2111.08617), as in its release [V].

        unit = (max - min) / (2^bits - 1);   level = floor((x - min) / unit + r);   value = min + unit * level

    per block of `block` elements, with r = 1/2 (`rounding='nearest'`) or uniform in [0, 1) ('stochastic').
    Zero stays zero for certain only at an end of the range.

    Wire: [unit | min] float32 per block, then the levels in 1 to 8 bits, padded to a byte: 8 ceil(n / block)
    + ceil(n bits / 8) bytes. A range beyond +-2^126 is clipped; a constant block is exact. NaN and Inf raise
    `NonFiniteError`. Error, with m elements in a block and L = 2^bits - 1: at most (unit / 2)^2 per element,
    on average if stochastic: omega = (m - 2) / (2 L^2), 1.13 for 4 bits and 512 elements. Normal values lose
    0.014, stochastic 0.028. Stochastic rounding is unbiased; rounding to nearest gets error feedback if omega
    < 1.

    >>> import torch
    >>> codec = MinMax(bits=2)
    >>> wire = codec.encode(torch.tensor([-1.0, 0.0, 0.3, 2.0]))
    >>> wire.numel(), codec.decode(wire, 4).tolist()
    (9, [-1.0, 0.0, 0.0, 2.0])
    """

    bits: int = 4
    block: int = 512
    rounding: Rounding = "nearest"

    concatenates: ClassVar[bool] = True

    paper: ClassVar[str] = "Markov et al. 2022, arXiv:2111.08617"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "IST-DASLab/torch_cgx"
    examples: ClassVar[tuple[str, ...]] = (
        "minmax()",
        "minmax(bits=8)",
        "minmax(bits=3, block=100, rounding='stochastic')",
    )

    def __post_init__(self) -> None:
        arguments.whole("minmax: bits", self.bits, 1, WIDEST)
        arguments.whole("minmax: block", self.block, 1, LONGEST)
        arguments.choice("minmax: rounding", self.rounding, get_args(Rounding))

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def needs_feedback(self) -> bool:
        return not self.unbiased and self.omega(LARGE) < 1

    @property
    def normal(self) -> tuple[float, float]:
        return NORMAL[0], FARTHEST

    def nbytes(self, n: int) -> int:
        return kernels.minmax_nbytes(n, self.bits, self.block)

    def message_nbytes(self, segments: Segments) -> int:
        return self._form(segments).message_nbytes(segments)

    def omega(self, n: int) -> float:
        m = longest(n, self.block)
        relative, absolute = ROUNDING
        return (m - 2) / (2 * (2**self.bits - 1) ** 2) * relative + absolute if m > 1 else 0.0

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        return kernels.minmax_encode(x, segments, keys, self._form(segments))

    def encode_layout(self, x: Tensor, layout: Layout, turn: Turn) -> Tensor:
        if self.unbiased:
            return super().encode_layout(x, layout, turn)
        return self.encode_segments(x, layout.segments, (0,) * len(layout))  # draws nothing

    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        return kernels.minmax_add_(wire, segments, out, self._form(segments), alpha)

    def decode_messages_add_(
        self, messages: Sequence[tuple[Tensor, Segments]], out: Tensor, alpha: float = 1
    ) -> Tensor:
        forms = tuple([self._form(segments) for _, segments in messages])
        return kernels.minmax_add_messages_(messages, out, forms, alpha)

    def _form(self, segments: Segments) -> MinMaxForm:
        return _form(self.bits, len(segments.sizes), self.block, self.rounding)


@lru_cache(maxsize=512)
def _form(bits: int, tensors: int, block: int, rounding: Rounding) -> MinMaxForm:
    return MinMaxForm((bits,) * tensors, block, rounding)
