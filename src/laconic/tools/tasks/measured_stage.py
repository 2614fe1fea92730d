"""A torch pipeline stage that measures computation and messages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from laconic.comm.message_counts import NONE, MessageCounts


@dataclass(frozen=True)
class Passed:
    forward_s: float = 0.0
    backward_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    activations: MessageCounts = NONE
    gradients: MessageCounts = NONE
    dense_activations: MessageCounts = NONE
    dense_gradients: MessageCounts = NONE

    def minus(self, before: Passed) -> Passed:
        return Passed(
            self.forward_s - before.forward_s,
            self.backward_s - before.backward_s,
            self.encode_s - before.encode_s,
            self.decode_s - before.decode_s,
            self.activations.minus(before.activations),
            self.gradients.minus(before.gradients),
            self.dense_activations.minus(before.dense_activations),
            self.dense_gradients.minus(before.dense_gradients),
        )


class MeasuredStage(PipelineStage):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.forward_s = self.backward_s = 0.0
        self.counts: Counter[str] = Counter()
        self.decoding: Callable[[], float] = float

    def forward_one_chunk(self, *given: Any, **named: Any) -> Any:
        began = time.perf_counter() - self.decoding()
        found = super().forward_one_chunk(*given, **named)
        self.forward_s += time.perf_counter() - self.decoding() - began
        return found

    def backward_one_chunk(self, *given: Any, **named: Any) -> Any:
        began = time.perf_counter() - self.decoding()
        found = super().backward_one_chunk(*given, **named)
        self.backward_s += time.perf_counter() - self.decoding() - began
        return found

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted("activations sent", super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted("gradients sent", super().get_bwd_send_ops(bwd_chunk_id))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted("activations received", super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted("gradients received", super().get_bwd_recv_ops(bwd_chunk_id))

    def dense(self, kind: str) -> MessageCounts:
        names = ("sent", "sent bytes", "received", "received bytes")
        return MessageCounts(*(self.counts[f"{kind} {name}"] for name in names))

    def _counted(self, kind: str, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        self.counts[kind] += len(ops)
        self.counts[f"{kind} bytes"] += sum(op.tensor.numel() * op.tensor.element_size() for op in ops)
        return ops
