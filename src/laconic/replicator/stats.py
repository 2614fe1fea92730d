"""Exchange and staleness statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from laconic.exchange.stats import Stats


@dataclass(frozen=True)
class ReplicatorStats(Stats):
    """Cumulative figures of this replica.

    Attributes:
        updates: Updates of the parameters, by all groups of replicas; in deployments without servers, the
            number of steps.
        staleness: Number of this replica's gradients by staleness: others' updates between pull and
            application.
        refused: Gradients rejected as too stale.
    """

    updates: int = 0
    staleness: Mapping[int, int] = field(default_factory=dict)
    refused: int = 0

    @classmethod
    def over(cls, stats: Stats) -> ReplicatorStats:
        if isinstance(stats, cls):
            return stats
        own = {each.name: getattr(stats, each.name) for each in fields(stats)}
        return cls(**own, updates=stats.steps, staleness={0: stats.steps} if stats.steps else {})
