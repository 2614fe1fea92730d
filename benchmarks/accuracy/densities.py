"""DGC at two densities against dense: 2,000 steps, 4 workers, 3 seeds.

Each experiment is a run of `laconic train` in runs/. From the finished run come its row in
benchmarks/accuracy/results.jsonl (figures, curves, machine, versions) and its picture in docs/.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.accuracy.trials import RUNS, curves
from benchmarks.common.machine import machine
from laconic.tools.cli.interrupts import Interrupts
from laconic.tools.cli.session import Session
from laconic.tools.cli.settings import Options, Settings
from laconic.tools.report.picture import picture
from laconic.tools.report.series import Run, read_run
from laconic.tools.report.summary import Row, summarise

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Experiment:
    """One model on one task, dense and compressed. Bounds are those that the project has set itself."""

    name: str
    task: str
    model: str
    steps: int
    warmup: int

    @property
    def specs(self) -> tuple[str, ...]:
        """What is compared with `dense()`."""
        return tuple(f"dgc(density={density}, warmup_steps={self.warmup})" for density in DENSITIES)

    def read(self) -> dict[str, Any] | None:
        """Return the stored row, or None."""
        return RUNS.get(f"densities/{self.name}")


EXPERIMENTS = (
    Experiment("cnn", "cifar10", "cnn", steps=2000, warmup=200),
    Experiment("lstm", "shakespeare", "lstm", steps=2000, warmup=200),
)
DENSITIES = (0.01, 0.001)
BOUNDS = {0.01: (0.5, 0.01), 0.001: (1.5, 0.03)}  # density: points of accuracy, share of the loss


def measure(experiment: Experiment, console: Console) -> None:
    """Train what is not there yet, and keep figures and picture."""
    run = train(experiment, quick=False, console=console)
    RUNS.put(f"densities/{experiment.name}", result(experiment, run))
    (ROOT / "docs" / f"accuracy-{experiment.name}.svg").write_text(picture(run))


def train(experiment: Experiment, *, quick: bool, console: Console) -> Run:
    """Train whatever is not there yet, and read the run."""
    name = f"bench-{experiment.name}{'-quick' if quick else ''}"
    steps = 12 if quick else experiment.steps
    options = Options(
        task=experiment.task,
        model=experiment.model,
        methods=experiment.specs,
        against=("dense()",),
        workers=4,
        seeds=1 if quick else 3,
        steps=steps,
        eval_every=max(1, steps // 12),
        checkpoint_every=0 if quick else 500,
        out=ROOT / "runs",
        name=name,
        resume=(ROOT / "runs" / name).exists() and not quick,
    )
    settings = Settings.of(options)
    Session(settings, console, Interrupts()).train_all()
    return read_run(settings.folder)


def result(experiment: Experiment, run: Run) -> dict[str, Any]:
    """Return the row of a run."""
    return {
        "experiment": asdict(experiment),
        "config": {key: value for key, value in run.config.items() if key != "started"},
        "machine": machine(),
        "rows": [asdict(row) for row in summarise(run)],
        "gaps": gaps(summarise(run)),
        "curves": {method.spec: curves(method) for method in run.methods},
    }


def gaps(rows: list[Row]) -> list[dict[str, Any]]:
    """Each method's distance from dense, and whether it is within its bound plus one standard error."""
    dense, out = rows[0], []
    for row, density in zip(rows[1:], DENSITIES, strict=True):
        points, share = BOUNDS[density]
        lost = 100 * (dense.accuracy.mean - row.accuracy.mean)
        error = 100 * (dense.accuracy.error**2 + row.accuracy.error**2) ** 0.5
        more = row.test_loss.mean / dense.test_loss.mean - 1
        more_error = (dense.test_loss.error**2 + row.test_loss.error**2) ** 0.5 / dense.test_loss.mean
        out.append(
            {
                "spec": row.spec,
                "points_lost": round(lost, 3),
                "standard_error_points": round(error, 3),
                "bound_points": points,
                "within_points": lost <= points + error,
                "loss_more_percent": round(100 * more, 3),
                "standard_error_percent": round(100 * more_error, 3),
                "bound_percent": 100 * share,
                "within_loss": more <= share + more_error,
            }
        )
    return out
