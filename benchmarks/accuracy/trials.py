"""One training of one method with one seed: stored as a row of figures and curves, never repeated."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy.contenders import CONTENDERS, MODELS, SEEDS, STEPS, WORKERS, Contender
from benchmarks.common.machine import machine
from benchmarks.common.results import Results, Row
from laconic.tools.cli.settings import Options, Settings
from laconic.tools.report.curves import accuracy_by_step, loss_by_megabyte, loss_by_step
from laconic.tools.report.ledger import slug
from laconic.tools.report.series import MethodSeries, Run, seed_series
from laconic.tools.report.summary import plain, summarise
from laconic.tools.tasks import find
from laconic.tools.tasks.launcher import WorkerFailed, launch
from laconic.tools.tasks.loading import prepare
from laconic.tools.tasks.settings import Event, TrainingSettings

RUNS = Results(Path(__file__).with_name("results.jsonl"))
SCRATCH = Path(__file__).parents[2] / "runs" / "accuracy"
CURVE = 40  # points
ABOUT = ("spec", "task", "model", "seed", "workers", "steps", "batch", "lr", "skew", "bits")


@dataclass(frozen=True)
class Trial:
    """One method on one task with one seed."""

    contender: Contender
    task: str
    seed: int

    @property
    def key(self) -> str:
        crowd = "" if self.contender.workers == WORKERS else f"-{self.contender.workers}-workers"
        skew = "" if self.contender.skew is None else f"-skew-{self.contender.skew:g}"
        return f"{self.task}{crowd}{skew}/{slug(self.contender.spec)}-{self.seed}"

    @property
    def done(self) -> bool:
        return self.key in RUNS

    def __str__(self) -> str:
        skew = "" if self.contender.skew is None else f", skew {self.contender.skew:g}"
        return f"{self.task}{skew}, seed {self.seed}: {self.contender.text}"


def trials(contenders: Sequence[Contender] = CONTENDERS) -> Iterator[Trial]:
    """All of them, every method with one seed before the next seed."""
    for seed in range(SEEDS):
        for task in MODELS:
            for contender in contenders:
                yield Trial(contender, task, seed)


def train(trial: Trial, steps: int = STEPS) -> dict[str, Any]:
    """Train, and give what is to be kept. A training whose gradients cease to be finite is a result too.

    Raises `WorkerFailed` for any other failure.
    """
    plan = plan_of(trial, steps)
    events: list[Event] = []
    diverged, began = False, time.monotonic()
    try:
        for event in launch(plan):
            events.append(event)
    except WorkerFailed as failure:
        diverged = failure.error == "NonFiniteError" and any(event["kind"] == "step" for event in events)
        if not diverged:
            raise
    about = {name: getattr(plan, name) for name in ABOUT}
    minutes = round((time.monotonic() - began) / 60, 2)
    series = MethodSeries(plan.spec, (seed_series(trial.seed, events),))
    row = summarise(Run({}, (series,)))[0]
    figures = {
        "accuracy": None if diverged else row.accuracy.mean,
        "test_loss": None if diverged else row.test_loss.mean,
        "train_loss": None if diverged else row.train_loss.mean,
        "payload_mb": row.payload_mb,
        "wire_mb": row.wire_mb,
        "smaller": row.smaller,
        "zeros": row.zeros,
        "consensus": row.consensus,
        "step_s": row.step_s.mean,
    }
    ended = {"diverged_at": series.common if diverged else None, "minutes": minutes, "machine": machine()}
    thin = {name: {axis: curve[axis] for axis in "xy"} for name, curve in curves(series, CURVE).items()}
    return about | figures | ended | thin


def plan_of(trial: Trial, steps: int) -> TrainingSettings:
    """The training as `laconic train` would plan it."""
    options = Options(
        task=trial.task,
        model=MODELS[trial.task],
        methods=(trial.contender.spec,),
        workers=trial.contender.workers,
        seed=trial.seed,
        steps=steps,
        lr=trial.contender.rates.get(trial.task),
        eval_every=max(1, steps // 10),
        out=SCRATCH,
        name=trial.task,
        skew=trial.contender.skew,
        bits=trial.contender.bits.get(trial.task),
    )
    settings = Settings.of(options)
    data = settings.folder / "data.pt"
    if not data.exists():
        prepare(find(trial.task), None, data)
    return TrainingSettings(
        task=settings.task,
        model=settings.model,
        spec=settings.specs[0],
        seed=trial.seed,
        workers=settings.workers,
        steps=settings.steps,
        batch=settings.batch,
        lr=settings.lr,
        eval_every=settings.eval_every,
        checkpoint_every=0,
        data=data,
        folder=settings.folder,
        threads=max(1, (os.cpu_count() or 1) // settings.workers),
        skew=settings.skew,
        bits=settings.bits,
    )


def keep(trial: Trial, found: Row) -> None:
    """Store the row of a training."""
    RUNS.put(trial.key, {name: plain(value) for name, value in found.items()})


def kept(contender: Contender, task: str) -> list[Row]:
    """Return the stored rows of one method on one task, by seed."""
    found = (RUNS.get(Trial(contender, task, seed).key) for seed in range(SEEDS))
    return [row for row in found if row is not None]


def curves(method: MethodSeries, kept: int = 60) -> dict[str, dict[str, list[float]]]:
    """Return curves by name, thinned to about `kept` points: x, y and standard error."""
    made = {
        "test accuracy, percent, by step": accuracy_by_step(method),
        "training loss by step": loss_by_step(method),
        "training loss by MB sent": loss_by_megabyte(method),
    }
    out = {}
    for name, curve in made.items():
        every = max(1, len(curve.x) // kept)
        parts = {"x": curve.x, "y": curve.y, "error": curve.error}
        out[name] = {key: [round(float(v), 5) for v in values[::every]] for key, values in parts.items()}
    return out
