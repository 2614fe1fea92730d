"""Cutoff: small elements become zero, the others one of few levels, rounded at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic import kernels
from laconic.codecs.quantiser import Quantiser, variance
from laconic.core import arguments
from laconic.core.layout import Segments
from laconic.core.spec import Status
from laconic.kernels.quantise.form import Form, Measure


@dataclass(frozen=True, repr=False)
class Cutoff(Quantiser):
    """The threshold quantiser of QCMD and QRDA AdaGrad (Xu et al. 2022, arXiv:2208.05631): reconstruction.

    Here |x| < share * mean |x| of its tensor (`rule='mean'`), or share * max |x| ('max'), becomes 0; the rest
    are rounded at random to 0, 1/s, ..., 1 of max |x|, s = `levels`.

    Wire: that of `qsgd(block=0)`. Error: a dropped element loses its square, the rest (sqrt(1 + (n - 1) /
    s^2) - 1) / 2 of theirs: omega is the larger of 1 and that; with rule 'max' no entry loses more than 1 /
    (s share) - 1 of its square, or 1/8. Biased, without error feedback.

    >>> import torch
    >>> codec = Cutoff(share=0.5, rule="max", levels=2)
    >>> codec.decode(codec.encode(torch.tensor([4.0, 1.9, -2.0])), 3).tolist()
    [4.0, 0.0, -2.0]
    """

    share: float = 0.5
    rule: str = "mean"
    levels: int = 1

    unbiased: ClassVar[bool] = False
    paper: ClassVar[str] = "Xu et al. 2022, arXiv:2208.05631"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = ("cutoff()", "cutoff(share=0.1, rule='max', levels=7)")

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.choice("cutoff: rule", self.rule, ("mean", "max"))
        most = 1 if self.rule == "max" else None
        keeps_all = "qsgd(block=0) leaves nothing out"
        arguments.number(f"cutoff: share of the {self.rule}", self.share, above=0, most=most, hint=keeps_all)

    @property
    def needs_feedback(self) -> bool:
        return False

    @property
    def form(self) -> Form:
        return Form(self.levels)

    def measures(self, x: Tensor, segments: Segments) -> Measure:
        floors = (float(self.share) * kernels.norms(x, segments, Measure(self.rule))).nan_to_num(nan=0.0)
        return Measure(floors=floors)

    def omega(self, n: int) -> float:
        lost = variance.uniform(n, self.levels, "max")
        if self.rule == "max":
            lost = min(lost, max(0.125, 1 / (self.levels * self.share) - 1) * variance.ROUNDING)
        return max(1.0, lost)
