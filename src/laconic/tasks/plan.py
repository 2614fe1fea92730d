"""What one training of one method with one seed is to do, and what it says while it does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic.strategies.method import Method
from laconic.strategies.strategy import Strategy

Event = dict[str, Any]
Emit = Callable[[Event], None]


@dataclass(frozen=True)
class Plan:
    """One training: travels to every worker, and names the folder of its checkpoints."""

    task: str
    model: str | None
    spec: str
    seed: int
    workers: int
    steps: int
    batch: int
    lr: float | None  # None: the usual one of the model and the optimiser
    eval_every: int
    checkpoint_every: int
    data: Path  # the prepared tensors, see `loading.py`
    folder: Path  # for checkpoints
    threads: int
    resume_from: Path | None = None
    patience_s: float | None = None  # of a strategy with a lost worker; None: a loss ends the training
    restarts: int = 0  # how many killed workers are started anew, in all
    bits: int | None = None  # of the model's layers, see `lowbit`; None: float32
    skew: float | None = None  # alpha of the workers' shards, see `skew.py`; None: all draw from all examples

    def patience_of(self, spec: Strategy | Method) -> float | None:
        """What `distribute` is given: methods need every worker, and take no patience."""
        return self.patience_s if isinstance(spec, Strategy) else None

    @property
    def signature(self) -> Event:
        """What must be equal for a checkpoint of one plan to serve another."""
        return {
            "task": self.task,
            "model": self.model,
            "spec": self.spec,
            "seed": self.seed,
            "steps": self.steps,
            "batch": self.batch,
            "lr": self.lr,
            "skew": self.skew,
            "bits": self.bits,
        }
