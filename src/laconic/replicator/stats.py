"""What a replica's exchanges have cost, and how stale its gradients were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from laconic.exchange.stats import Stats


@dataclass(frozen=True)
class ReplicatorStats(Stats):
    """Cumulative figures of this replica.

    Attributes:
        updates: Updates of the parameters so far, by all groups together; without servers, the steps.
        staleness: How many of this replica's gradients were applied after so many updates of others since
            their parameters were pulled. Without servers all are applied at 0.
        refused: Gradients that were older than the bound, and not applied.
    """

    updates: int = 0
    staleness: Mapping[int, int] = field(default_factory=dict)
    refused: int = 0

    @classmethod
    def over(cls, stats: Stats) -> ReplicatorStats:
        """The same figures; of replicas without servers the histogram has one bar."""
        if isinstance(stats, cls):
            return stats
        own = {each.name: getattr(stats, each.name) for each in fields(stats)}
        return cls(**own, updates=stats.steps, staleness={0: stats.steps} if stats.steps else {})
