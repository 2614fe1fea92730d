"""Change coding: a sample's activation as the change since the sample's last visit.

AC-SGD, also AQ-SGD (Wang et al. 2022, arXiv:2206.01299). Both sides of a boundary store m[sample]:

    first visit      wire = first(a)              m[s]  = decoded wire
    later visits     wire = codec(a - m[s])       m[s] += decoded wire
    the next stage continues with m[s], on every visit

Both sides add the *decoded* change, so their buffers stay bit-identical with any lossy codec.
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
LIMIT = 0.5  # E|x - C(x)|^2 / |x|^2 below which AC-SGD is proven to converge
SHOWN = 4096  # elements on which a codec's error is measured


@dataclass(frozen=True, repr=False)
class Change(PipelineCoding):
    """Sends a sample's change by `codec`, and its activation at the first visit by the cast `first`.

    Wire per sample: one wire of `codec`; at the first visit 4 ('fp32') or 2 ('bf16', 'fp16') bytes per
    element.

    Memory: one activation per sample on each side of each boundary. Samples have to recur. Dropout and
    augmentation bound the error from below.

    `along` is the order in which the codec sees a (sequence, hidden) activation. `minmax(bits=4,
    block=hidden)` has one scale per row, `minmax(bits=4, block=sequence)` with along='channels' one per
    channel, as in the release. The theory requires E|x - C(x)|^2 < |x|^2 / 2.

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
        return FIRST[self.first]

    def error(self) -> float:
        """Return the share of |x|^2 that one visit of a normal x loses, or a smaller declared bound."""
        declared = self.codec.omega(SHOWN)
        if declared < LIMIT:
            return declared
        x = torch.randn(
            SHOWN, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu"
        )
        lost = x - self.codec.decode(self.codec.encode(x, key=1), SHOWN)
        return float(lost.square().sum() / x.square().sum())
