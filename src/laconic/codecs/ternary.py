"""Ternary: each element as -s, 0 or s, with one scale per tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.codecs.quantiser import Quantiser, check_clip, variance
from laconic.core.layout import Segments
from laconic.core.spec import Status
from laconic.kernels.quantise.form import Form, Measure


@dataclass(frozen=True, repr=False)
class Ternary(Quantiser):
    """The code of TernGrad (Wen et al. 2017, arXiv:1705.07878).

        s = min(max |x|, max(clip sigma, rms))
        x clipped to -s and s;   sign(x) s with probability |x| / s, else 0

    sigma is the population standard deviation; `clip=0` does not clip. The root mean square rms is ours: it
    equals sigma for a mean of 0, and keeps a tensor with a large mean from being clipped to sigma. A clip
    between 0 and 1 acts as 1.

    Wire: scale float32 (1,), then codes [sign | level] of 2 bits, padded to a byte: 4 + ceil(n / 4) bytes;
    with `packing='base3'`, five per byte: 4 + ceil(n / 5) bytes. Error: omega = (sqrt(n) - 1) / 2 without
    clipping, and then unbiased. With it 1 + t^2 / 8 for t <= 4 and t - 1 beyond, t = min(max(clip, 1),
    sqrt(n)): 1.8 for clip = 2.5. Without error feedback, as in the paper.

    >>> import torch
    >>> codec = Ternary(clip=0.0)
    >>> wire = codec.encode(torch.tensor([2.0, -2.0, 0.0, 2.0, 0.0]))
    >>> wire.numel(), codec.decode(wire, 5).tolist()
    (6, [2.0, -2.0, 0.0, 2.0, 0.0])
    """

    clip: float = 2.5
    packing: str = "bits"

    paper: ClassVar[str] = "Wen et al. 2017, arXiv:1705.07878"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "wenwei202/terngrad"
    examples: ClassVar[tuple[str, ...]] = (
        "ternary()",
        "ternary(clip=0)",
        "ternary(clip=1.0, packing='base3')",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clip(self.name, self.clip)

    @property
    def unbiased(self) -> bool:
        return self.clip == 0

    @property
    def needs_feedback(self) -> bool:
        return False

    @property
    def form(self) -> Form:
        return Form(levels=1, packing=self.packing)

    def measures(self, x: Tensor, segments: Segments) -> Measure:
        return Measure(clip=self.clip)

    def omega(self, n: int) -> float:
        return variance.clipped(n, self.clip) if self.clip else variance.uniform(n, 1, "max")
