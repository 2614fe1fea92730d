"""Threshold ternary: small elements become zero, the others one number with their signs, deterministically.

Li, Zhang, Liu 2016, arXiv:1605.04711 ("Ternary weight networks"), applied to gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.sign import lost
from laconic.core import arguments
from laconic.core.errors import NonFiniteError, WireError
from laconic.core.spec import Status
from laconic.core.tensor_codec import TensorCodec


@dataclass(frozen=True, repr=False)
class ThresholdTernary(TensorCodec):
    """C(x) = m * sign(x) where |x| >= share * mean |x| of its tensor, else 0; m is the mean of those |x|.

    Wire: m float32 (1,), then five elements per byte in base 3: 4 + ceil(n / 5) bytes; nothing for an empty
    tensor.

    Error: with k of n elements sent, |C(x) - x|^2 = |x|^2 - k m^2 and |x|^2 <= (k^2 + n - k) m^2: omega = 1 -
    1/n. Normal x loses 0.19 at share 0.7, the least possible. Biased. `compress` uses it without error
    feedback, because an element with small gradients should not move; `error_fed(threshold_ternary())` adds
    it. NaN and Inf raise `NonFiniteError`.

    >>> codec = ThresholdTernary()
    >>> wire = codec.encode(torch.tensor([4.0, 0.5, -2.0, 0.0]))
    >>> wire.numel(), codec.decode(wire, 4).tolist()
    (5, [3.0, 0.0, -3.0, 0.0])
    """

    share: float = 0.7

    unbiased: ClassVar[bool] = False
    paper: ClassVar[str] = "Li et al. 2016, arXiv:1605.04711"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = ("threshold_ternary()", "threshold_ternary(share=1.0)")

    def __post_init__(self) -> None:
        hint = "beyond the mean, nothing of a constant tensor would be sent"
        arguments.number("threshold_ternary: share of the mean", self.share, above=0, most=1, hint=hint)

    @property
    def needs_feedback(self) -> bool:
        return False

    def encode_tensor(self, x: Tensor, key: int) -> Tensor:
        if not bool(x.isfinite().all()):
            raise NonFiniteError("a mean cannot hold NaN or Inf: skip such a step, as `compress` does")
        if not x.numel():
            return x.new_empty(0, dtype=torch.uint8)
        size = x.abs().double()
        kept = (size >= self.share * (1 - 1e-9) * size.mean()) & (x != 0)  # rounding must not drop a constant
        mean = size[kept].mean() if bool(kept.any()) else size.new_zeros(())
        levels = torch.where(kept, x.sign(), 0.0).to(torch.int32)
        return torch.cat([mean.float().view(1).view(torch.uint8), kernels.pack_ternary(levels)])

    def decode_tensor(self, wire: Tensor, n: int) -> Tensor:
        if not n:
            return wire.new_empty(0, dtype=torch.float32)
        mean = wire[:4].clone().view(torch.float32)
        if bool(torch.signbit(mean)) or not bool(mean.isfinite()):
            raise WireError("a mean magnitude is negative or not finite")
        return kernels.unpack_ternary(wire[4:].clone(), n) * mean

    def nbytes(self, n: int) -> int:
        return 4 * min(n, 1) + kernels.ternary_nbytes(n)

    def omega(self, n: int) -> float:
        return lost(n)
