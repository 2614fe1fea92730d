"""QSGD: levels of the largest entry, or of the norm, of each short bucket, rounded at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.codecs import variance
from laconic.codecs.quantiser import Measures, Quantiser, check_norm, longest
from laconic.core.errors import SpecError
from laconic.core.layout import Segments
from laconic.core.spec import Status
from laconic.kernels.quantise.form import Form


@dataclass(frozen=True, repr=False)
class QSGD(Quantiser):
    """QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic 2017, arXiv:1610.02132).

        z = norm(bucket);   a = s |x| / z;   level = floor(a) + (U < a - floor(a));   value = sign z level / s

    Levels 0, 1/s, ..., 1 of the norm of each bucket of B elements: 'max', as in the authors' experiments, or
    'l2', as in their theory. 1 to 32767 levels: 1 gives 2 bits an element, 7 give 4, 127 give 8.

    Wire: scales float32 (ceil(n / B),), then codes [sign | level] of 1 + bit_length(s) bits, padded to a
    byte; B = 0 makes the whole tensor one bucket. `qsgd(levels=7)` sends 4 + 32/512 bits an element.
    Error, with m the longest bucket: omega = (sqrt(1 + (m - 1) / s^2) - 1) / 2 for 'max'; for 'l2'
    sqrt(m) / s - 1 where that is at least 1, else m / (4 s^2). Unbiased, so error feedback is not needed. A
    high omega (a long bucket, few levels) is noise for plain training, and makes error feedback diverge.

    >>> import torch
    >>> codec = QSGD(levels=4, bucket=0)
    >>> wire = codec.encode(torch.tensor([1.0, -0.5, 0.0, 0.25]))
    >>> wire.numel(), codec.decode(wire, 4).tolist()
    (6, [1.0, -0.5, 0.0, 0.25])
    """

    levels: int = 7
    bucket: int = 512
    norm: str = "max"
    coding: str = "fixed"

    unbiased: ClassVar[bool] = True
    paper: ClassVar[str] = "Alistarh et al. 2017, arXiv:1610.02132"
    status: ClassVar[Status] = "verified"
    examples: ClassVar[tuple[str, ...]] = (
        "qsgd()",
        "qsgd(levels=1, bucket=100)",
        "qsgd(levels=127, bucket=4096)",
        "qsgd(levels=5, bucket=0, norm='l2')",
        "qsgd(levels=1000, bucket=77, norm='l2')",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_norm(self.name, self.norm)
        if self.coding != "fixed":
            raise SpecError(f"qsgd: coding must be 'fixed', got {self.coding!r}")

    @property
    def form(self) -> Form:
        return Form(self.levels, self.bucket)

    def measures(self, x: Tensor, segments: Segments) -> Measures:
        return {"norm": self.norm}

    def omega(self, n: int) -> float:
        return variance.uniform(longest(n, self.bucket), self.levels, self.norm)
