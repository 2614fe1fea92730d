"""What a block has done so far: bytes, seconds, residuals, and the spans of its last tick."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Messages:
    """Messages of one kind. `dense_bytes`: what those sent would be as float32."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0
    dense_bytes: int = 0

    def plus(self, sent: int = 0, received: int = 0, dense: int = 0) -> Messages:
        """With one more message of this many bytes, if any."""
        return Messages(
            self.sent + (sent > 0),
            self.sent_bytes + sent,
            self.received + (received > 0),
            self.received_bytes + received,
            self.dense_bytes + dense,
        )


@dataclass(frozen=True)
class Span:
    """A piece of work, from `begin` to `end` by `time.perf_counter`, one clock for a machine's processes."""

    work: str  # "forward", or "update": of T, X and U
    begin: float
    end: float


@dataclass(frozen=True)
class Stats:
    """Cumulative figures of this rank.

    Attributes:
        ticks: Calls of `step`, and those of `finish`.
        updates: Mini-batches that this block has trained on.
        activations: Messages to the next block, and from the one before.
        targets: Messages to the block before, and from the next one.
        forward_s: Seconds of forward passes for other blocks.
        update_s: Seconds of the block's own sub-problems.
        encode_s: Seconds of packing.
        decode_s: Seconds of unpacking.
        waited_s: Seconds of sending, and of waiting for neighbours.
        primal: |X - f| / |f| of the last mini-batch, X what this block is given and f what the block before
            gives; 0 on the first block.
        dual: |X - X of the visit before| / |f| of the same; of a first visit, of X after the forward pass.
        kept_bytes: Bytes of stored X and U, in RAM or on disk; 0 in mode 'online'.
    """

    ticks: int
    updates: int
    activations: Messages
    targets: Messages
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
        """How many times fewer bytes than float32 this rank has sent; 1 before it has sent any."""
        sent = self.activations.sent_bytes + self.targets.sent_bytes
        dense = self.activations.dense_bytes + self.targets.dense_bytes
        return dense / sent if sent else 1.0
