"""Cost of messages on a link: a latency each, plus bytes at the link's rate (alpha-beta model).

    collective       messages in sequence
    all_reduce       2 (N - 1), in a ring; 2 if short
    broadcast        log2 N, in a tree
    all_gather,      2: lengths, then all messages at once
    all_to_all
    other            1

Hockney 1994, Parallel Computing 20(3); for collectives Thakur et al. 2005, IJHPCA 19(1). Links are full
duplex, one per worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil, log2

from laconic.comm import wire_model
from laconic.tools.plan.rehearsal import Rehearsed

# messages in sequence, by number of workers and bytes
ROUNDS: Mapping[str, Callable[[int, float], int]] = {
    "all_reduce": lambda size, nbytes: wire_model.rounds(nbytes * size / (2 * (size - 1)), size),
    "broadcast": lambda size, nbytes: ceil(log2(size)),
    "all_gather": lambda size, nbytes: 2,
    "all_to_all": lambda size, nbytes: 2,
    "reduce_scatter": lambda size, nbytes: 1,
    "exchange": lambda size, nbytes: 1,
}


@dataclass(frozen=True)
class Network:
    """Every worker's link.

    Attributes:
        bytes_a_second: Rate in each direction.
        latency_s: Seconds per message.
        busy_latency_s: The same while workers compute; None: equal.
        toll_s_a_byte: Computing time that each byte costs a computing worker.
    """

    bytes_a_second: float
    latency_s: float = 50e-6
    busy_latency_s: float | None = None
    toll_s_a_byte: float = 0.0

    @property
    def busy(self) -> Network:
        return replace(self, latency_s=self.latency_s if self.busy_latency_s is None else self.busy_latency_s)

    def seconds(self, rehearsed: Rehearsed, size: int, *, part: float = 1.0) -> float:
        """Return the seconds to exchange `part` of the model.

        >>> from laconic.tools.plan.growth import Growth
        >>> from laconic.tools.plan.rehearsal import Traffic
        >>> once, nothing = Growth((0, 0, 0, 1)), Growth((0, 0, 0, 0))
        >>> sent = Traffic(once, Growth((1e6, 0, 0, 0)))  # an all_gather of 1 MB a worker
        >>> round(Network(1e8, 0.001).seconds(Rehearsed("", {"all_gather": sent}, nothing, nothing), 11), 6)
        0.102
        """
        if size == 1:
            return 0.0
        total = 0.0
        for kind, each in rehearsed.traffic.items():
            calls, nbytes = each.calls.at(size), part * each.nbytes.at(size)
            in_sequence = calls * ROUNDS[kind](size, nbytes / max(calls, 1.0))
            total += in_sequence * self.latency_s + nbytes / self.bytes_a_second
        return total
