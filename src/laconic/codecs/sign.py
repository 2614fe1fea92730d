"""Sign: one bit per element and one number per block, its mean magnitude.

Zheng, Huang, Kwok 2019, arXiv:1905.10936 (blockwise, dist-EF-blockSGD); Karimireddy et al. 2019,
arXiv:1901.09847 (why it needs error feedback); Bernstein et al. 2018, arXiv:1802.04434 (signSGD).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic import kernels
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.layout import Segments
from laconic.core.message_runs import add_runs_
from laconic.core.spec import Status

MOST = 1 << 30  # elements of a block


@dataclass(frozen=True, repr=False)
class Sign(Codec):
    """C(x) = mean |x| * sign(x) per block of `block` elements, the last one shorter.

    Wire: mean magnitudes float32 (ceil(n / block),), sign bits (ceil(n / 8) bytes; 1 is negative, lowest bit
    first): 1 + 32 / block bits per element.

    Error: omega = 1 - 1/b, b = min(n, block). With m = |x|_1 / b of a block of b elements,

        |C(x) - x|^2 = sum (|x_i| - m)^2 = |x|^2 - 2 m |x|_1 + b m^2 = |x|^2 - |x|_1^2 / b <= (1 - 1/b) |x|^2

    with equality for a single nonzero entry; rounding m adds at most 2^-48 of |x|^2, in the normal range.
    Biased: use error feedback. The key draws the sign of a zero: an entry without a gradient does not move on
    average. NaN and Inf raise `NonFiniteError`.

    >>> import torch
    >>> codec = Sign(block=2)
    >>> wire = codec.encode(torch.tensor([1.0, -3.0, 0.5]))
    >>> wire.numel(), codec.decode(wire, 3).tolist()
    (9, [2.0, -2.0, 0.5])
    """

    block: int = 1024

    unbiased: ClassVar[bool] = False
    concatenates: ClassVar[bool] = True
    paper: ClassVar[str] = "Zheng et al. 2019, arXiv:1905.10936"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = ("sign()", "sign(block=64)", "sign(block=37)", "sign(block=1)")

    def __post_init__(self) -> None:
        arguments.whole("sign: block", self.block, 1, MOST, "for one mean per tensor, use signmean()")

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        return kernels.sign_encode(x, segments, self.block, keys)

    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        return kernels.sign_add_(wire, segments, out, alpha, self.block)

    def decode_messages_add_(
        self, messages: Sequence[tuple[Tensor, Segments]], out: Tensor, alpha: float = 1
    ) -> Tensor:
        add = kernels.sign_messages_add_
        add_runs_(self, messages, lambda wires, segments: add(wires, segments, out, alpha, self.block))
        return out

    def nbytes(self, n: int) -> int:
        return kernels.sign_nbytes(n, self.block)

    def omega(self, n: int) -> float:
        return lost(min(n, self.block))


def lost(b: int) -> float:
    """Return the largest share of |x|^2 that a block of b elements loses."""
    return 1 - 1 / b + 2.0**-48 if b > 1 else 0.0
