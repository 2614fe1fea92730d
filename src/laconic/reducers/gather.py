"""Gather: every rank's message goes to every rank, and all decode the same mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.errors import SpecError, WireError
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.reducers.reducer import BoundReducer, Reducer, Sent, SentMessage

Grain = Literal["tensor", "bucket"]


@dataclass(frozen=True, repr=False)
class Gather(Reducer):
    """mean = 1/N * sum over ranks r = 0..N-1, in this order, of decode(wire_r): bit-identical on all.

    Payload: one message of the codec `message`. Its unit (of selection, of scales) is a tensor, or, with
    `grain` 'bucket', all neighbouring tensors of a bucket together; then the result depends on how DDP cuts
    its buckets.

    >>> from laconic.core.spec import parse
    >>> parse("gather(cast('bf16'), grain='bucket')")
    gather(cast(dtype='bf16'), grain='bucket')
    """

    message: Codec
    grain: Grain = "tensor"

    examples: ClassVar[tuple[str, ...]] = (
        "gather(dense())",
        "gather(cast('fp16'))",
        "gather(sparse(topk(density=1.0)))",
        "gather(sparse(topk(density=0.05), indices=golomb()), grain='bucket')",
        "gather(sparse(randomk(density=0.1)))",
        "gather(sparse(ramp(topk(density=0.01), densities=(0.5,), every=2)))",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.message, Codec):
            raise SpecError(f"gather takes a codec, such as sparse(topk(density=0.01)), got {self.message!r}")
        arguments.choice("gather: grain", self.grain, get_args(Grain))

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return _Gather(self, comm)

    def nbytes(self, layout: Layout) -> int:
        return self.message.message_nbytes(self.units(layout).segments)

    def codec(self) -> Codec:
        return self.message

    def units(self, layout: Layout) -> Layout:
        """What the codec sees as one tensor each."""
        return layout if self.grain == "tensor" else layout.runs


@dataclass(frozen=True)
class _Gather(BoundReducer):
    spec: Gather
    comm: Comm

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        codec, units = self.spec.message.at(turn.step), self.spec.units(layout)
        segments = units.segments
        if x is out and not kernels.all_finite(x, segments):  # a gradient that no feedback has looked at
            x = None
        if x is None:
            wire = told = out.new_empty(0, dtype=torch.uint8)  # an empty message: not finite
        else:
            wire = codec.encode_layout(x, units, turn)
            told = wire if segments.numel else out.new_zeros(1, dtype=torch.uint8)  # nothing, but finite
        wires = self.comm.all_gather(told)
        if any(each.numel() == 0 for each in wires):
            return None
        segments.zero_(out)
        if segments.numel:
            for rank, each in enumerate(wires):
                try:
                    codec.decode_segments_add_(each, segments, out, alpha / self.comm.size)
                except WireError as error:
                    raise WireError(f"the message that rank {rank} sent is damaged: {error}") from error
        return SentMessage(codec, wire, segments)
