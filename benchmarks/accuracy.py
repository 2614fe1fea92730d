"""Accuracy at equal steps: dense against DGC, on real data, with 4 workers and 3 seeds.

    python -m benchmarks.accuracy                all of it, hours on 2 cores; goes on where it stopped
    python -m benchmarks.accuracy --only lstm    one of the experiments
    python -m benchmarks.accuracy --quick        a few steps of each, to see that it runs; keeps no figures

Each experiment is a run of `laconic train` in runs/. From the finished run come its JSON in
benchmarks/results/ (figures, curves, machine, versions), its picture in docs/ and the table in
docs/accuracy.md: nothing is written by hand. Needs LACONIC_DATA.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import machine
from laconic.cli.session import Session
from laconic.cli.settings import Settings
from laconic.report.curves import accuracy_by_step, loss_by_megabyte, loss_by_step
from laconic.report.picture import picture
from laconic.report.series import MethodSeries, Run, read_run
from laconic.report.summary import Row, summarise

HERE = Path(__file__).parent
ROOT = HERE.parent
KEPT = 60  # points of a curve that the JSON keeps


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


EXPERIMENTS = (
    Experiment("cnn", "cifar10", "cnn", steps=2000, warmup=200),
    Experiment("lstm", "shakespeare", "lstm", steps=2000, warmup=200),
)
DENSITIES = (0.01, 0.001)
BOUNDS = {0.01: (0.5, 0.01), 0.001: (1.5, 0.03)}  # density: points of accuracy, share of the loss


def train(experiment: Experiment, quick: bool, console: Console) -> Run:
    """Train whatever is not there yet, and read the run."""
    name = f"bench-{experiment.name}{'-quick' if quick else ''}"
    steps = 12 if quick else experiment.steps
    settings = Settings.of(
        task=experiment.task,
        model=experiment.model,
        methods=experiment.specs,
        against=("dense()",),
        workers=4,
        seeds=1 if quick else 3,
        seed=0,
        steps=steps,
        batch=None,
        lr=None,
        eval_every=max(1, steps // 12),
        checkpoint_every=0 if quick else 500,
        data=None,
        out=ROOT / "runs",
        name=name,
        resume=(ROOT / "runs" / name).exists() and not quick,
    )
    Session(settings, console).train_all()
    return read_run(settings.folder)


def result(experiment: Experiment, run: Run) -> dict[str, Any]:
    """What benchmarks/results/ keeps of a run."""
    return {
        "experiment": asdict(experiment),
        "config": {key: value for key, value in run.config.items() if key != "started"},
        "machine": machine(),
        "rows": [asdict(row) for row in summarise(run)],
        "gaps": gaps(summarise(run)),
        "curves": {method.spec: curves(method) for method in run.methods},
    }


def curves(method: MethodSeries) -> dict[str, dict[str, list[float]]]:
    """A method's curves, thinned."""
    made = {
        "test accuracy, percent, by step": accuracy_by_step(method),
        "training loss by step": loss_by_step(method),
        "training loss by MB sent": loss_by_megabyte(method),
    }
    out = {}
    for name, curve in made.items():
        every = max(1, len(curve.x) // KEPT)
        parts = {"x": curve.x, "y": curve.y, "error": curve.error}
        out[name] = {key: [round(float(v), 5) for v in values[::every]] for key, values in parts.items()}
    return out


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


def page(results: list[dict[str, Any]]) -> str:
    """docs/accuracy.md, from the JSON files."""
    lines = [
        "# Accuracy at equal steps",
        "",
        "4 workers, 3 seeds, mean ± standard error; payload a worker and step after the warm-up. Made by",
        "`python -m benchmarks.accuracy` from `benchmarks/results/accuracy-*.json`.",
    ]
    for found in results:
        config, name = found["config"], found["experiment"]["name"]
        lines += [
            "",
            f"## {config['title']}: `{config['model']}`, {config['steps']} steps",
            "",
            f"![training loss by bytes and by step](accuracy-{name}.svg)",
            "",
            "| method | test accuracy, % | test loss | payload, MB | times smaller |",
            "|---|---|---|---|---|",
        ]
        for row in found["rows"]:
            accuracy, loss = row["accuracy"], row["test_loss"]
            lines.append(
                f"| `{row['spec']}` | {100 * accuracy['mean']:.2f} ± {100 * accuracy['error']:.2f}"
                f" | {loss['mean']:.4f} ± {loss['error']:.4f}"
                f" | {row['payload_mb']:.4f} | {row['smaller']:.0f} |"
            )
        lines += ["", "| method | points lost | bound | loss more, % | bound |", "|---|---|---|---|---|"]
        for gap in found["gaps"]:
            verdict = ["outside", "within"]
            lines.append(
                f"| `{gap['spec']}` | {gap['points_lost']:.2f} ± {gap['standard_error_points']:.2f}"
                f" | {gap['bound_points']} ({verdict[gap['within_points']]})"
                f" | {gap['loss_more_percent']:.2f} ± {gap['standard_error_percent']:.2f}"
                f" | {gap['bound_percent']:g} ({verdict[gap['within_loss']]}) |"
            )
    lines += [
        "",
        "Where 0.001 falls short: these are small models. A thousandth of them is a few hundred entries a",
        "worker and step, so that an entry waits for hundreds of steps: much of a training this short.",
        "The curves in the JSON files show the gap closing in the second half of the CIFAR-10 training.",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Train, then write what is kept."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--only", choices=[experiment.name for experiment in EXPERIMENTS])
    options = arguments.parse_args()
    console = Console()
    for experiment in EXPERIMENTS:
        if options.only not in (None, experiment.name):
            continue
        run = train(experiment, options.quick, console)
        if options.quick:
            console.print(f"{experiment.name}: {len(run.methods)} methods ran")
            continue
        found = json.dumps(result(experiment, run), indent=1)
        (HERE / "results" / f"accuracy-{experiment.name}.json").write_text(found)
        (ROOT / "docs" / f"accuracy-{experiment.name}.svg").write_text(picture(run))
    if not options.quick:
        files = [HERE / "results" / f"accuracy-{experiment.name}.json" for experiment in EXPERIMENTS]
        results = [json.loads(file.read_text()) for file in files if file.exists()]
        (ROOT / "docs" / "accuracy.md").write_text(page(results))


if __name__ == "__main__":
    main()
