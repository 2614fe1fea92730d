"""Natural: every element becomes one of the two neighbouring powers of two, at random and without bias.

Horvath et al. 2019, arXiv:1905.10988 ("Natural compression"); the 8-bit packing after sands-lab/grace.
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


@dataclass(frozen=True, repr=False)
class Natural(Codec):
    """C(x) = sign(x) 2^(a+1) with probability p, else sign(x) 2^a, where |x| = 2^a (1 + p).

    Wire:

        bits=9   [sign bits, ceil(n / 8) bytes, 1 is negative | exponent uint8 (n,) in 0..254, 0 is zero]
        bits=8   [sign 1 | code 7] (n,), code = exponent - 18 clipped to 0..127, 0 is zero

    Error: p (1 - p) 4^a per element, so omega = 1/8; powers of two are exact. With 9 bits it is unbiased from
    zero through the denormals (which become 0 or 2^-126) up to 2^127; larger values become 2^127. With 8
    bits, only from 2^-108 to 2^18: smaller results become zero, larger ones 2^18. So it counts as biased, and
    `compress` gives it error feedback. NaN and Inf raise `NonFiniteError`.

    >>> import torch
    >>> codec = Natural()
    >>> wire = codec.encode(torch.tensor([1.0, -0.25, 0.0]), key=1)
    >>> wire.numel(), codec.decode(wire, 3).tolist()
    (4, [1.0, -0.25, 0.0])
    """

    bits: int = 9

    concatenates: ClassVar[bool] = True
    paper: ClassVar[str] = "Horvath et al. 2019, arXiv:1905.10988"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "SamuelHorvath/Compressed_SGD_PyTorch"
    examples: ClassVar[tuple[str, ...]] = (
        "natural()",
        "natural(bits=8)",
        "sparse(randomk(density=0.1), values=natural())",
    )

    def __post_init__(self) -> None:
        arguments.choice(
            "natural: bits", self.bits, (9, 8), "9 hold every exponent, 8 those of 2^-108 to 2^18"
        )

    @property
    def unbiased(self) -> bool:
        return self.bits == 9

    @property
    def normal(self) -> tuple[float, float]:
        return (2.0**-126, 2.0**127) if self.bits == 9 else (2.0**-108, 2.0**18)

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        return kernels.natural_encode(x, segments, keys, self.bits)

    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        return kernels.natural_add_(wire, segments, out, alpha, self.bits)

    def decode_messages_add_(
        self, messages: Sequence[tuple[Tensor, Segments]], out: Tensor, alpha: float = 1
    ) -> Tensor:
        add = kernels.natural_messages_add_
        add_runs_(self, messages, lambda wires, segments: add(wires, segments, out, alpha, self.bits))
        return out

    def nbytes(self, n: int) -> int:
        return kernels.natural_nbytes(n, self.bits)

    def omega(self, n: int) -> float:
        return 1 / 8
