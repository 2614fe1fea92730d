"""Direct coding: one codec for activations and one for their gradients, without memory.

AC-SGD's baseline (Wang et al. 2022, arXiv:2206.01299).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.codecs.minmax import MinMax
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.spec import Status
from laconic.pipeline.coding import PipelineCoding

EIGHT = MinMax(8)


@dataclass(frozen=True, repr=False)
class Direct(PipelineCoding):
    """Sends every activation by `forward` and every gradient of an activation by `backward`.

    >>> Direct(MinMax(4)).backward_coding
    minmax(bits=8)
    """

    forward: Codec
    backward: Codec = EIGHT

    status: ClassVar[Status] = "own"
    examples: ClassVar[tuple[str, ...]] = (
        "direct(minmax(bits=4))",
        "direct(cast('fp16'), backward=cast('fp16'))",
    )

    def __post_init__(self) -> None:
        arguments.piece("direct: forward", self.forward, Codec, "minmax(bits=4)")
        arguments.piece("direct: backward", self.backward, Codec, "minmax(bits=8)")

    @property
    def forward_coding(self) -> Codec:
        return self.forward

    @property
    def backward_coding(self) -> Codec:
        return self.backward
