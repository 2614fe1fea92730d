"""Sign mean: one bit per element and one number per tensor, its mean magnitude.

The values of sparse ternary compression: Sattler et al. 2019, arXiv:1903.02891.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic import kernels
from laconic.codecs.sign import lost
from laconic.core.codec import Codec
from laconic.core.layout import Segments
from laconic.core.message_runs import add_runs_
from laconic.core.spec import Status


@dataclass(frozen=True, repr=False)
class SignMean(Codec):
    """C(x) = mean |x| * sign(x), tensor by tensor: `sign` with one block of any length.

    Wire: that of `sign` with one mean: 4 + ceil(n / 8) bytes; nothing for an empty tensor. Error: omega = 1 -
    1/n. Biased: use error feedback. The key draws the sign of a zero. NaN and Inf raise `NonFiniteError`.

    >>> import torch
    >>> codec = SignMean()
    >>> wire = codec.encode(torch.tensor([1.0, -3.0]))
    >>> wire.numel(), codec.decode(wire, 2).tolist()
    (5, [2.0, -2.0])
    """

    unbiased: ClassVar[bool] = False
    concatenates: ClassVar[bool] = True
    paper: ClassVar[str] = "Sattler et al. 2019, arXiv:1903.02891"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "felisat/federated-learning"
    examples: ClassVar[tuple[str, ...]] = (
        "signmean()",
        "sparse(topk(density=0.05), values=signmean(), indices=golomb())",
    )

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        return kernels.sign_encode(x, segments, keys=keys)

    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        return kernels.sign_add_(wire, segments, out, alpha)

    def decode_messages_add_(
        self, messages: Sequence[tuple[Tensor, Segments]], out: Tensor, alpha: float = 1
    ) -> Tensor:
        add = kernels.sign_messages_add_
        add_runs_(self, messages, lambda wires, segments: add(wires, segments, out, alpha))
        return out

    def nbytes(self, n: int) -> int:
        return kernels.sign_nbytes(n, 0)

    def omega(self, n: int) -> float:
        return lost(n)
