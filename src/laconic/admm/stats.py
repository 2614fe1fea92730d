"""Statistics of a block, and the spans of its last tick."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.comm.message_counts import MessageCounts


@dataclass(frozen=True)
class Span:
    """Work between two values of `time.perf_counter`, which a machine's processes share."""

    work: str  # "forward", or "update": of T, X and U
    begin: float
    end: float


@dataclass(frozen=True)
class Stats:
    """Cumulative figures of this rank.

    Attributes:
        ticks: Calls of `step`, and ticks of `finish`.
        updates: Mini-batches trained on by this block.
        activations: Messages to the next block and from the previous one.
        targets: Messages to the previous block and from the next one.
        forward_s: Seconds in forward passes for other blocks.
        update_s: Seconds in the block's sub-problems.
        encode_s: Seconds encoding.
        decode_s: Seconds decoding.
        waited_s: Seconds sending and waiting for neighbours.
        primal: |X - f| / |f| of the last mini-batch: X the block's input, f the previous block's output; 0 on
            the first block.
        dual: |X - X of the previous visit| / |f|; on a first visit, from X after the forward pass.
        kept_bytes: Bytes of stored X and U; 0 in mode 'online'.
    """

    ticks: int
    updates: int
    activations: MessageCounts
    targets: MessageCounts
    forward_s: float
    update_s: float
    encode_s: float
    decode_s: float
    waited_s: float
    primal: float
    dual: float
    kept_bytes: int

    @property
    def ratio(self) -> float:
        """Bytes as float32 / bytes sent by this rank; 1 before the first message."""
        sent = self.activations.sent_bytes + self.targets.sent_bytes
        dense = self.activations.dense_bytes + self.targets.dense_bytes
        return dense / sent if sent else 1.0
