"""Settings of one training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from laconic.exchange.method import Method
from laconic.strategies.strategy import Strategy
from laconic.tools.tasks.options import TrainingOptions, fixed

Event = dict[str, Any]
Emit = Callable[[Event], None]


@dataclass(frozen=True)
class Pipeline:
    """A model cut into stages: rank `stage + stages * replica`."""

    stages: int
    replicas: int
    micro_batches: int
    schedule: str  # "1f1b" or "gpipe"
    between: str  # method of the replicas

    def __str__(self) -> str:
        """Format the settings.

        >>> print(Pipeline(2, 2, 4, "1f1b", "cgx()"))
        2 stages, 4 micro-batches, 1f1b, 2 replicas with cgx()
        """
        replicas = f", {self.replicas} replicas with {self.between}" if self.replicas > 1 else ""
        return f"{self.stages} stages, {self.micro_batches} micro-batches, {self.schedule}{replicas}"

    @property
    def workers(self) -> int:
        return self.stages * self.replicas

    def stage(self, rank: int) -> int:
        """Return the stage of a rank.

        >>> pipeline = Pipeline(2, 2, 4, "1f1b", "dense()")
        >>> [(pipeline.replica(rank), pipeline.stage(rank)) for rank in range(4)]
        [(0, 0), (0, 1), (1, 0), (1, 1)]
        """
        return rank % self.stages

    def replica(self, rank: int) -> int:
        return rank // self.stages


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(TrainingOptions):
    task: str
    model: str | None
    spec: str
    seed: int
    workers: int
    steps: int
    batch: int
    eval_every: int
    data: Path  # prepared by `loading.py`
    folder: Path
    threads: int
    resume_from: Path | None = None
    pipeline: Pipeline | None = None

    def patience_of(self, spec: Strategy | Method) -> float | None:
        return self.patience if isinstance(spec, Strategy) else None

    def quorum_of(self, spec: Strategy | Method) -> int | None:
        return self.quorum if isinstance(spec, Strategy) else None

    @property
    def signature(self) -> Event:
        names = ("task", "model", "spec", "seed", "steps", "batch", *fixed(TrainingOptions))
        pipeline = None if self.pipeline is None else asdict(self.pipeline)
        return {name: getattr(self, name) for name in names} | {"pipeline": pipeline}
