"""Change coding: a sample's activation as the change since the sample was last seen.

AC-SGD, also AQ-SGD (Wang et al. 2022, arXiv:2206.01299). For each stage boundary both sides keep m[sample]:

    first visit      wire = first(a)              m[s]  = decoded wire
    later visits     wire = codec(a - m[s])       m[s] += decoded wire
    the next stage continues with m[s], on every visit

Both sides add what is *decoded*, so their buffers are bit-identical for ever, whatever the codec loses. As
training settles, activations change less from epoch to epoch, and so does the error: that of direct
quantisation stays a fixed share of the activation itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from laconic.codecs.cast import Cast
from laconic.codecs.dense import Dense
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.spec import Status
from laconic.pipeline.coding import PipelineCoding

Along = Literal["rows", "channels"]
FIRST: dict[str, Codec] = {"fp32": Dense(), "bf16": Cast("bf16"), "fp16": Cast("fp16")}
LIMIT = 0.5  # E|x - C(x)|^2 / |x|^2 below which AC-SGD is proven to converge: c < sqrt(1/2), c^2 = 1/2
SHOWN = 4096  # elements of the normal vector that a codec is tried on


@dataclass(frozen=True, repr=False)
class Change(PipelineCoding):
    """Sends `codec` of a sample's change, and at its first visit the activation in `first`, a cast.

    Wire: one of `codec` a sample, or of `first`: 4, 2 or 2 bytes an element for 'fp32', 'bf16' and 'fp16'.
    Memory: an activation for each sample on either side of each boundary. Samples have to come again: in
    training of one epoch, all is first visits. Whatever makes a sample's activation jump from epoch to epoch
    (dropout, augmentation) is a floor under the change, and so under the error.

    Scales belong to the codec, and `along` says in which order it sees a (sequence, hidden) activation: one
    for each row is `minmax(bits=4, block=hidden)`, one for each channel, as in the release,
    `minmax(bits=4, block=sequence)` with along='channels', the last dimension first. The paper's theory asks
    for E|x - C(x)|^2 < |x|^2 / 2.

    >>> Change(Cast("fp16"), first="fp32")
    change(cast(dtype='fp16'), first='fp32')
    """

    codec: Codec
    first: str = "bf16"
    along: Along = "rows"

    paper: ClassVar[str] = "Wang et al. 2022, arXiv:2206.01299"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "DS3Lab/AC-SGD"
    examples: ClassVar[tuple[str, ...]] = (
        "change(minmax(bits=4))",
        "change(minmax(bits=2, block=64, rounding='stochastic'), first='fp32')",
        "change(sparse(topk(density=0.1)))",
        "change(minmax(bits=3, block=32), along='channels')",
    )

    def __post_init__(self) -> None:
        arguments.piece("change: codec", self.codec, Codec, "minmax(bits=4)")
        arguments.choice("change: first", self.first, tuple(FIRST))
        arguments.choice("change: along", self.along, get_args(Along))

    @property
    def first_codec(self) -> Codec:
        """What carries the first visit."""
        return FIRST[self.first]

    def error(self) -> float:
        """Share of |x|^2 that one visit leaves, of a normal x; the declared bound where that is smaller."""
        declared = self.codec.omega(SHOWN)
        if declared < LIMIT:
            return declared
        x = torch.randn(
            SHOWN, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu"
        )
        lost = x - self.codec.decode(self.codec.encode(x, key=1), SHOWN)
        return float(lost.square().sum() / x.square().sum())
