"""Table of a run: one row per method."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from laconic.core.atomic_file import write_text
from laconic.tools.report.figure import MB as MB
from laconic.tools.report.figure import UNKNOWN
from laconic.tools.report.figure import Figure as Figure
from laconic.tools.report.reaching import seconds_of, target_of
from laconic.tools.report.series import WIRE, Array, MethodSeries, Run, SeedSeries

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Row:
    """One method. Bytes and seconds per step are means over the second half of the steps, after any warm-up.

    Attributes:
        wire_mb: MB that a worker sends in a step, by `laconic.comm.wire_model`.
        smaller: MB of a float32 all-reduce, divided by `wire_mb`.
        against_first: The first baseline's `wire_mb`, divided by this one's.
        zeros: Share of zero weights.
        optimiser: Name and peak learning rate.
        consensus: Ranks' last distance from their average, relative to its norm.
        residual: |weights - few bits| / |weights| at the last test; 0 for float32.
        flips: Share of few-bit signs that changed between the last two tests.
        density: Share of weights in use at the end; 0 without masks.
        changed: Share of these added by the last update of masks.
        counted_mb: Total MB sent by a host's interface in a lab, else 0.
        noise_scale: Of the second half, in a worker's batches, or nan.
        kept_mb, kept_dense_mb: MB saved for backward at the last test, coded and uncoded; 0 if not coded.
        activations_mb, gradients_mb, replicas_mb: Parts of `wire_mb` in a pipeline, over all workers; else 0.
        waiting: Share of the step that a stage waits, mean over stages.
        reach_s: Seconds until a test reaches the target; nan if a seed never does.
    """

    spec: str
    seeds: int
    steps: int
    accuracy: Figure
    test_loss: Figure
    train_loss: Figure
    payload_mb: float
    wire_mb: float
    smaller: float
    total_mb: float
    step_s: Figure
    against_first: float
    zeros: float = 0.0
    optimiser: str = ""
    consensus: float = 0.0
    residual: float = 0.0
    flips: float = 0.0
    density: float = 0.0
    changed: float = 0.0
    counted_mb: float = 0.0
    noise_scale: float = math.nan
    skipped: float = 0.0
    loss_scale: float = 0.0
    kept_mb: float = 0.0
    kept_dense_mb: float = 0.0
    activations_mb: float = 0.0
    gradients_mb: float = 0.0
    replicas_mb: float = 0.0
    waiting: float = 0.0
    reach_s: Figure = UNKNOWN


def summarise(run: Run) -> list[Row]:
    rows = [_row(method, run.config) for method in run.methods]
    first = next(
        (row for row in rows if row.spec in run.config.get("against", [])), rows[0] if rows else None
    )
    if first is None:
        return []
    return [
        replace(row, against_first=first.wire_mb / row.wire_mb if row.wire_mb else math.inf) for row in rows
    ]


def counted(rows: list[Row]) -> str:
    sent = [f"{row.counted_mb:.4g} MB with {row.spec}" for row in rows if row.counted_mb]
    return f"Bytes that a host's interface sent, including tests: {', '.join(sent)}." if sent else ""


def residuals(rows: list[Row]) -> str:
    apart = [f"{row.residual:.4f} with {row.spec}" for row in rows if row.residual]
    return f"Primal residual at the last test: {', '.join(apart)}." if apart else ""


def flips(rows: list[Row]) -> str:
    found = [f"{100 * row.flips:.2f} % with {row.spec}" for row in rows if row.flips]
    return f"Signs that changed between the last two tests: {', '.join(found)}." if found else ""


def in_use(rows: list[Row]) -> str:
    found = [
        f"{100 * row.density:.2f} %, of these {100 * row.changed:.2f} % by the last update, with {row.spec}"
        for row in rows
        if row.density
    ]
    return f"Weights that masks leave in use at the end: {', '.join(found)}." if found else ""


def between(rows: list[Row]) -> str:
    sent = [
        f"{row.activations_mb:.4g} + {row.gradients_mb:.4g} + {row.replicas_mb:.4g} MB with {row.spec}"
        for row in rows
        if row.activations_mb
    ]
    if not sent:
        return ""
    return f"All workers send, per step, activations + their gradients + among replicas: {', '.join(sent)}."


def kept_bytes(rows: list[Row]) -> str:
    kept = [
        f"{row.kept_mb:.4g} of {row.kept_dense_mb:.4g} MB with {row.spec}"
        f" ({row.kept_dense_mb / row.kept_mb:.1f} times smaller)"
        for row in rows
        if row.kept_mb
    ]
    return f"Compressed layers store for backward, at the last test: {', '.join(kept)}." if kept else ""


def write_summary(folder: Path, run: Run, rows: list[Row], interrupted: str | None) -> None:
    content = {
        "config": run.config,
        "complete": run.complete,
        "interrupted": interrupted,
        "rows": [asdict(row) for row in rows],
    }
    write_text(folder / SUMMARY, json.dumps(plain(content), indent=1))


def _row(method: MethodSeries, config: dict[str, Any]) -> Row:
    late = slice(method.common // 2, None)

    def late_mean(name: str) -> float:
        return float(method.over_seeds(name)[:, late].mean())

    target = target_of(config)
    sent, tail = late_mean("network_sent"), slice(-max(1, method.common // 20), None)
    return Row(
        spec=method.spec,
        seeds=len(method.seeds),
        steps=method.common,
        accuracy=Figure.of(seed.accuracy[at] for seed, at in last_tests(method)),
        test_loss=Figure.of(seed.test_loss[at] for seed, at in last_tests(method)),
        train_loss=Figure.of(method.over_seeds("loss")[:, tail].mean(axis=1)),
        payload_mb=late_mean("payload_sent") / MB,
        wire_mb=sent / MB,
        smaller=late_mean("dense") / sent if sent else math.inf,
        total_mb=float(method.over_seeds("network_sent").sum(axis=1).mean()) / MB,
        step_s=Figure.of(np.median(method.over_seeds("step_s")[:, late], axis=1)),
        against_first=1.0,
        zeros=last_mean([seed.zeros for seed in method.seeds]),
        optimiser=method.seeds[0].optimiser,
        consensus=last_mean([seed.consensus for seed in method.seeds]),
        residual=last_mean([seed.residual for seed in method.seeds]),
        flips=last_mean([seed.flips for seed in method.seeds]),
        density=last_mean([seed.density for seed in method.seeds]),
        changed=last_mean([seed.changed for seed in method.seeds]),
        counted_mb=float(np.mean([seed.counted.mean() if len(seed.counted) else 0 for seed in method.seeds]))
        / MB,
        noise_scale=Figure.of(seed.noise.scale(0.5) for seed in method.seeds).mean,
        skipped=float(np.mean([seed.skipped for seed in method.seeds])),
        loss_scale=last_mean([seed.loss_scale for seed in method.seeds]),
        kept_mb=last_mean([seed.kept for seed in method.seeds]) / MB,
        kept_dense_mb=last_mean([seed.kept_dense for seed in method.seeds]) / MB,
        reach_s=UNKNOWN if target is None else seconds_of(method, target),
        **_pipelined(config, late_mean),
    )


def last_tests(method: MethodSeries) -> list[tuple[SeedSeries, int]]:
    steps = set.intersection(*(set(seed.eval_steps.tolist()) for seed in method.seeds))
    return [(seed, seed.eval_steps.tolist().index(max(steps))) for seed in method.seeds] if steps else []


def _pipelined(config: dict[str, Any], late_mean: Callable[[str], float]) -> dict[str, float]:
    if config.get("pipeline") is None:
        return {}
    parts = {name.replace("_sent", "_mb"): config["workers"] * late_mean(name) / MB for name in WIRE}
    return parts | {"waiting": late_mean("waited_s") / late_mean("step_s")}


def last_mean(series: Iterable[Array]) -> float:
    return float(np.mean([values[-1] if len(values) else 0.0 for values in series]))


def plain(value: object) -> object:
    """Replace nan and infinity, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
