"""What an exchange has cost so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from laconic.comm.metered import Meter


@dataclass
class Seconds:
    """Where the time of the exchanges went."""

    encode_s: float = 0.0
    communicate_s: float = 0.0
    decode_s: float = 0.0

    def add(self, began: float, ended: float, first: float | None, busy: float) -> None:
        """One exchange: begin, end, when its first collective began, and the seconds in all of them."""
        self.encode_s += (ended if first is None else first) - began
        if first is not None:
            self.communicate_s += busy
            self.decode_s += ended - first - busy


@dataclass(frozen=True)
class Stats:
    """Cumulative figures of this rank.

    `payload`: bytes that the method handed to collectives, once. `wire`: the same times each collective's
    message pattern, with headers and acknowledgements, by the model that `laconic.comm.link` states.
    `dense`: what a float32 exchange would have handed over. `buckets`: into how
    many DDP cuts a step. `phases`: payload sent, by reduction and
    collective, such as "sum() all_reduce".
    """

    steps: int
    payload_sent: int
    payload_received: int
    wire_sent: int
    wire_received: int
    dense: int
    encode_s: float
    communicate_s: float
    decode_s: float
    buckets: int = 0
    phases: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, meter: Meter, seconds: Seconds, *, steps: int, dense: int, buckets: int = 0) -> Stats:
        """What a meter and a clock have counted."""
        return cls(
            steps=steps,
            payload_sent=meter.payload_sent,
            payload_received=meter.payload_received,
            wire_sent=meter.wire_sent,
            wire_received=meter.wire_received,
            dense=dense,
            **vars(seconds),
            buckets=buckets,
            phases={" ".join(key).strip(): part.payload_sent for key, part in meter.parts.items()},
        )

    @property
    def ratio(self) -> float:
        """How many times smaller than dense the payload is; 1 before anything was sent."""
        return self.dense / self.payload_sent if self.payload_sent else 1.0
