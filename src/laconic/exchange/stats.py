"""Cumulative cost of the exchanges: bytes and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from laconic.comm.metered import Meter
from laconic.exchange.noise_scale import Noise
from laconic.exchange.stopwatch import Seconds


@dataclass(frozen=True)
class Stats:
    """Cumulative figures of this rank.

    Attributes:
        steps: Steps so far.
        payload_sent: Bytes that the method passed to collectives, each counted once.
        payload_received: Bytes that collectives returned.
        network_sent: Bytes that this rank put on the wire, by `laconic.comm.wire_model`, with headers and
            acknowledgements. Among N ranks an `all_gather` sends N - 1 copies, an all-reduce 2(N-1)/N of its
            bytes.
        network_received: The same for received bytes.
        dense: `network_sent` of all-reduces of the same tensors in float32.
        encode_s: Seconds before the first collective of each exchange. On a GPU these three are measured in
            the first 8 steps, then in one of 8, times 8.
        communicate_s: Seconds in collectives.
        decode_s: The remaining seconds of each exchange.
        buckets: DDP's buckets per step.
        phases: Payload sent, by purpose and collective; the sum is `payload_sent`. For a method, such as
            "gather(qsgd()) all_gather", the first part is the printed reducer; "sum()" also includes
            one-dimensional tensors left uncompressed. Others are "sparse gradients" (of embeddings,
            uncompressed), "parameters minmax()" (FSDP2's all-gather, by its codec) and
            "parameters uncompressed" (of modules with several dtypes). For a strategy: "gossip" (to
            neighbours), "slow momentum" (SlowMo's mean), "centre" (EASGD), "periods" (LSGD's step counts),
            "election" (ranks' losses), "local leader" and "leader" (the best model of a group and of all
            ranks), "inside a machine".
            Without a purpose: a mean of parameters, or an agreement, such as on a scale.
        noise: Gradient noise, in batches of a rank: `noise.examples(unit=64)` is the largest useful batch
            if a rank has 64 examples. Measured on tensors summed uncompressed; None without any, on one
            rank, and for strategies.
    """

    steps: int
    payload_sent: int
    payload_received: int
    network_sent: int
    network_received: int
    dense: int
    encode_s: float
    communicate_s: float
    decode_s: float
    buckets: int = 0
    phases: Mapping[str, int] = field(default_factory=dict)
    noise: Noise | None = None

    @classmethod
    def of(
        cls,
        meter: Meter,
        seconds: Seconds,
        *,
        steps: int,
        dense: int,
        buckets: int = 0,
        noise: Noise | None = None,
    ) -> Stats:
        return cls(
            steps=steps,
            payload_sent=meter.payload_sent,
            payload_received=meter.payload_received,
            network_sent=meter.network_sent,
            network_received=meter.network_received,
            dense=dense,
            **seconds.so_far(),
            buckets=buckets,
            phases={" ".join(key).strip(): part.payload_sent for key, part in meter.parts.items()},
            noise=noise,
        )

    @property
    def ratio(self) -> float:
        """`dense / network_sent`, or 1 before the first message: below 1 a method sends more than dense."""
        return self.dense / self.network_sent if self.network_sent else 1.0
