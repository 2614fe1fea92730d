"""AC-SGD: activations as quantised changes, their gradients quantised directly.

Wang et al. 2022, arXiv:2206.01299 (also called AQ-SGD); release DS3Lab/AC-SGD (checked).

Differences: the release has one symmetric fp16 scale per hidden channel of a whole micro-batch, which
saturates at (1 - 2^-(b-1)) of the maximum; `minmax` has a minimum and a unit per `block` of one sample. Its
first epoch is in fp16; here each sample's first visit is in bf16 (`first`). Its buffers are fp16, ours
float32 (`keep`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from laconic.codecs.minmax import MinMax, Rounding
from laconic.core import arguments
from laconic.core.spec import Status
from laconic.kernels.minmax import LONGEST, WIDEST
from laconic.pipeline.coding import PipelineCoding
from laconic.pipeline.codings.change import FIRST, Change


@dataclass(frozen=True, repr=False)
class AcSgd(PipelineCoding):
    """Activations by `change(minmax(bits=forward))`, their gradients by `minmax(bits=backward)`.

        forward, sample s    first visit: a itself, m[s] = a;  later: d = Q(a - m[s]), m[s] += d on both sides
        backward             Q(gradient of the boundary's activation), without memory

    Payload: forward + 64 / block bits per activation after its first visit, backward + 64 / block bits per
    gradient. The release rounds to nearest; its theory requires 'stochastic'.

    >>> AcSgd(forward=2, backward=6).forward_coding
    change(minmax(bits=2, block=128))
    """

    name: ClassVar[str] = "ac_sgd"
    forward: int = 4
    backward: int = 8
    block: int = 128
    rounding: Rounding = "nearest"
    first: str = "bf16"

    paper: ClassVar[str] = "Wang et al. 2022, arXiv:2206.01299"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "DS3Lab/AC-SGD"
    examples: ClassVar[tuple[str, ...]] = ("ac_sgd()", "ac_sgd(forward=2, backward=6)")

    def __post_init__(self) -> None:
        arguments.whole("ac_sgd: forward", self.forward, 1, WIDEST)
        arguments.whole("ac_sgd: backward", self.backward, 1, WIDEST)
        arguments.whole("ac_sgd: block", self.block, 1, LONGEST)
        arguments.choice("ac_sgd: rounding", self.rounding, get_args(Rounding))
        arguments.choice("ac_sgd: first", self.first, tuple(FIRST))

    @property
    def forward_coding(self) -> Change:
        return Change(MinMax(self.forward, self.block, self.rounding), self.first)

    @property
    def backward_coding(self) -> MinMax:
        return MinMax(self.backward, self.block, self.rounding)
