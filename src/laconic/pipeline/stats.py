"""Traffic counts of a rank's boundaries."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Counts by direction."""

    sent_bytes: Counter[str] = field(default_factory=Counter)
    received_bytes: Counter[str] = field(default_factory=Counter)
    dense_bytes: Counter[str] = field(default_factory=Counter)
    encode_s: float = 0.0
    decode_s: float = 0.0

    def sent(self, direction: str, nbytes: int, dense: int, seconds: float) -> None:
        self.sent_bytes[direction] += nbytes
        self.dense_bytes[direction] += dense
        self.encode_s += seconds

    def received(self, direction: str, nbytes: int, seconds: float) -> None:
        self.received_bytes[direction] += nbytes
        self.decode_s += seconds


@dataclass(frozen=True)
class Stats:
    """Cumulative statistics of this rank.

    Attributes:
        steps: Training steps so far.
        forward_sent: Bytes of activations sent, with headers.
        forward_received: Bytes of activations received.
        backward_sent: The same for gradients.
        backward_received: The same for gradients.
        dense_forward: Bytes that torch's own stage would have sent.
        dense_backward: The same for gradients.
        first_visits: Samples sent over a boundary for the first time.
        changes: Samples sent as a change.
        buffer_bytes: Bytes of this rank's buffers.
        encode_s: Seconds of encoding.
        decode_s: Seconds of decoding.
    """

    steps: int
    forward_sent: int
    forward_received: int
    backward_sent: int
    backward_received: int
    dense_forward: int
    dense_backward: int
    first_visits: int
    changes: int
    buffer_bytes: int
    encode_s: float
    decode_s: float

    @classmethod
    def of(
        cls, traffic: Traffic, *, steps: int, first_visits: int = 0, changes: int = 0, buffer_bytes: int = 0
    ) -> Stats:
        return cls(
            steps=steps,
            forward_sent=traffic.sent_bytes["forward"],
            forward_received=traffic.received_bytes["forward"],
            backward_sent=traffic.sent_bytes["backward"],
            backward_received=traffic.received_bytes["backward"],
            dense_forward=traffic.dense_bytes["forward"],
            dense_backward=traffic.dense_bytes["backward"],
            first_visits=first_visits,
            changes=changes,
            buffer_bytes=buffer_bytes,
            encode_s=traffic.encode_s,
            decode_s=traffic.decode_s,
        )

    @property
    def ratio(self) -> float:
        """Dense bytes divided by sent bytes; 1 before the first tensor."""
        dense = self.dense_forward + self.dense_backward
        return dense / (self.forward_sent + self.backward_sent) if dense else 1.0
