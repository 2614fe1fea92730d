"""Gather: every rank sends its message to all ranks, and all decode the same mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.messages import Sent, SentEntries, SentMessage, add_messages_, sent_by
from laconic.comm.skippable import fits, gather_or_skip
from laconic.core import arguments, deferred
from laconic.core.codec import Carried, Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Layout, Segments
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.reducers import BoundReducer, Gathering, Reducer

Grain = Literal["tensor", "bucket"]


@dataclass(frozen=True, repr=False)
class Gather(Reducer):
    """mean = 1/N * sum over ranks r = 0..N-1, in this order, of decode(wire_r): bit-identical on all.

    Payload: one message of `codec`. `grain`: unit of selection and scales, a tensor or, with 'bucket', all
    adjacent tensors of a bucket, and the result depends on DDP's buckets.

    >>> from laconic.core.spec import parse
    >>> parse("gather(cast('bf16'), grain='bucket')")
    gather(cast(dtype='bf16'), grain='bucket')
    """

    status: ClassVar[Status] = "own"

    codec: Codec
    grain: Grain = "tensor"

    examples: ClassVar[tuple[str, ...]] = (
        "gather(dense())",
        "gather(cast('fp16'))",
        "gather(sparse(topk(density=1.0)))",
        "gather(sparse(topk(density=0.05), indices=golomb()), grain='bucket')",
        "gather(sparse(randomk(density=0.1)))",
        "gather(sparse(density_schedule(topk(density=0.01), densities=(0.5,), every=2)))",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise SpecError(f"gather takes a codec, such as sparse(topk(density=0.01)), got {self.codec!r}")
        arguments.choice("gather: grain", self.grain, get_args(Grain))

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return _Gather(self, comm)

    def nbytes(self, layout: Layout) -> int:
        return self.codec.message_nbytes(self.grains(layout).segments)

    def gathers(self, size: int) -> tuple[Gathering, ...]:
        return (Gathering(self.codec, size),)

    def feedback_codec(self) -> Codec:
        return self.codec

    def grains(self, layout: Layout) -> Layout:
        return layout if self.grain == "tensor" else layout.runs


@dataclass(frozen=True)
class _Gather(BoundReducer):
    spec: Gather
    comm: Comm

    def writes_late(self, step: int) -> bool:
        return True

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        codec, grains = self.spec.codec.at(turn.step), self.spec.grains(layout)
        segments = grains.segments
        own, carried = None, None
        if x is not None:
            if segments.numel:
                own, carried = codec.encode_carried(x, grains, turn)
                if deferred.is_late() and not self._fits(x, segments, carried, alpha):
                    own = None
            else:
                own = x.new_empty(0, dtype=torch.uint8)
        wires = gather_or_skip(self.comm, own, out.device)
        if wires is None:
            return None
        messages = [SentMessage(codec, wire, segments) for wire in wires]
        share = messages[self.comm.rank] if carried is None else SentEntries(segments, *carried)
        deferred.write(lambda: self._add_(segments.zero_(out), messages, share, alpha / self.comm.size))
        return share

    def _add_(self, out: Tensor, messages: Sequence[SentMessage], share: Sent, alpha: float) -> None:
        ordered = [*enumerate(messages)]
        if not isinstance(share, SentEntries) or not out.is_cpu:
            add_messages_(out, ordered, alpha)
            return
        for rank, message in ordered:
            with sent_by(rank):
                (share if rank == self.comm.rank else message).add_to_(out, alpha)

    def _fits(self, x: Tensor, segments: Segments, carried: Carried | None, alpha: float) -> bool:
        """Return whether alpha times the decoded x is certainly finite.

        A codec that is safe for feedback decodes to at most twice the norm.
        """
        if carried is not None:
            return fits([carried[2]], alpha)
        return fits(segments.merged.views(x), alpha * 2 * math.sqrt(segments.numel))
