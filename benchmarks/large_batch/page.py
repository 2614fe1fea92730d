"""The blocks of docs/large_batches.md: from the runs of both benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.augmentation import __main__ as augmentation
from benchmarks.augmentation.__main__ import BATCH, RATE, STEPS, VARIANTS
from benchmarks.common.results import Results
from benchmarks.common.tables import spread, table
from benchmarks.large_batch import __main__ as large_batch
from benchmarks.large_batch.__main__ import BASE, EXAMPLES, RATES

NAMES = {"sgd": "SGD, linear scaling", "lars": "LARS", "lamb": "LAMB"}
CHANCE = 0.1  # accuracy of a net that predicts one class of ten
TARGET = 1.5  # points that a recipe may lose at 8 times the batch


def large() -> str:
    """The block on batch sizes."""
    return large_of(*_done(large_batch.RUNS, [trial.key for trial in large_batch.trials()]))


def copies() -> str:
    """The block on batch augmentation."""
    return copies_of(*_done(augmentation.RUNS, [key for _, _, key in augmentation.trials()]))


def _done(runs: Results, planned: list[str]) -> tuple[list[dict[str, Any]], int]:
    """The rows that are stored, and how many are planned."""
    found = (runs.get(key) for key in planned)
    return [row for row in found if row is not None], len(planned)


def large_of(runs: Sequence[dict[str, Any]], planned: int) -> str:
    """The block of these runs."""
    rates = f"{RATES['sgd']:g} for SGD, {RATES['lars']:g} for LARS, {RATES['lamb']:g} for LAMB"
    lines = [
        f"CIFAR-10, the small CNN of `laconic train`, {EXAMPLES:,} examples in every run: a larger batch",
        f"takes fewer steps. Rates at the base batch of {BASE}: {rates}.",
        "SGD has a good rate of the small batch, LARS and LAMB the better of two at 8 times the batch.",
        f"Mean ± standard error over seeds. {len(runs)} of {planned} runs are done. A *collapsed* seed",
        "predicts one class in the end; it is not in the mean.",
    ]
    return "\n".join([*lines, "", *_large(runs)] if runs else lines)


def copies_of(runs: Sequence[dict[str, Any]], planned: int) -> str:
    """The block of these runs."""
    lines = [
        f"CIFAR-10, the same network, {STEPS:,} steps of {BATCH} examples by SGD at a peak rate of {RATE:g},",
        f"cropped, mirrored and with a patch cut out. {len(runs)} of {planned} runs are done.",
    ]
    return "\n".join([*lines, "", *_copied(runs)] if runs else lines)


def _large(runs: Sequence[dict[str, Any]]) -> list[str]:
    base = [run for run in runs if (run["kind"], run["times"]) == ("sgd", 1)]
    scale = noise_scale(base)
    rows = []
    for kind, times in sorted(
        {(run["kind"], run["times"]) for run in runs}, key=lambda key: (key[1], key[0])
    ):
        own = [run for run in runs if (run["kind"], run["times"]) == (kind, times)]
        batch = BASE * times
        left = f"{100 * (BASE + scale) / (batch + scale):.0f}" if scale else "-"
        trained = [run for run in own if run["accuracy"] > CHANCE]
        fallen = len(own) - len(trained)
        reached = figure(trained, accuracy) if trained else "-"
        rows.append(
            (
                f"{batch:,}",
                f"{own[0]['steps']:,}",
                NAMES[kind],
                f"{reached} ({fallen} of {len(own)} collapsed)" if fallen else reached,
                "-" if fallen else points(trained, base),
                left,
            )
        )
    heads = ("batch", "steps", "optimiser", "test accuracy, %", "points lost", "progress left, predicted, %")
    lines = table(heads, rows)
    if scale:
        lines += ["", *_predicted(runs, base, scale)]
    return lines


def _predicted(runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]], scale: float) -> list[str]:
    quarters = ((0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1))
    ends = ", ".join(f"{noise_scale(base, part):,.0f}" for part in quarters)
    lines = [
        f"The noise scale of the small batch's own training is {scale:,.0f} examples in its second half",
        f"({ends} by quarter). *Progress left*: with B0 = {BASE}, (B0 + noise) / (B + noise) of the",
        "small batch's progress per example.",
    ]
    best = [
        (statistics.mean(accuracy(run) for run in own), kind)
        for kind in ("lars", "lamb")
        if (own := [run for run in runs if (run["kind"], run["times"]) == (kind, 8)])
    ]
    if best:
        lost = statistics.mean(map(accuracy, base)) - max(best)[0]
        said = "within" if lost <= TARGET else "**not** within"
        lines += [
            "",
            f"At 8 times the batch and an eighth of the steps, {NAMES[max(best)[1]]} is {said}"
            f" {TARGET:g} points of the small batch: it loses {lost:.2f}.",
        ]
    return [*lines, "", _breaks(runs, base, scale)]


def _breaks(runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]], scale: float) -> str:
    """The least batch at which each optimiser loses more than TARGET points, beside the noise scale."""
    least: dict[str, int] = {}
    for kind, times in sorted({(run["kind"], run["times"]) for run in runs}, key=lambda key: key[1]):
        own = [accuracy(run) for run in runs if (run["kind"], run["times"]) == (kind, times)]
        if statistics.mean(map(accuracy, base)) - statistics.mean(own) > TARGET:
            least.setdefault(kind, BASE * times)
    said = "; ".join(
        f"{batch:,} for {NAMES[kind]} ({batch / scale:.1f} noise scales)" for kind, batch in least.items()
    )
    return f"More than {TARGET:g} points are lost from this batch on: {said or 'none'}."


def _copied(runs: Sequence[dict[str, Any]]) -> list[str]:
    base = [run for run in runs if run["variant"] == VARIANTS[0].name]
    rows = []
    for variant in VARIANTS:
        own = [run for run in runs if run["variant"] == variant.name]
        if own:
            rows.append(
                (
                    variant.name,
                    str(len(own)),
                    *(figure(own, at(own[0], share)) for share in (1 / 3, 2 / 3)),
                    figure(own, accuracy),
                    points(own, base),
                    f"{own[0]['inputs']:,}",
                    f"{own[0]['read']:,}",
                )
            )
    heads = ("copies", "seeds", "at 1/3 of the steps, %", "at 2/3, %", "test accuracy, %", "points lost")
    return table((*heads, "inputs", "examples read"), rows)


def at(run: dict[str, Any], share: float) -> Callable[[dict[str, Any]], float]:
    """The accuracy in % at this share of the steps."""
    place = max(0, round(share * len(run["curve"])) - 1)
    return lambda each: 100 * float(each["curve"][place][1])


def accuracy(run: dict[str, Any]) -> float:
    """Of the test set, in %."""
    return 100 * float(run["accuracy"])


def figure(runs: Sequence[dict[str, Any]], of: Callable[[dict[str, Any]], float]) -> str:
    """Mean ± standard error; without the error for one run."""
    return spread([of(run) for run in runs])


def points(runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> str:
    """By how many points less than the baseline, over the seeds that both have."""
    pairs = [
        accuracy(other) - accuracy(run) for run in runs for other in base if run["seed"] == other["seed"]
    ]
    return f"{statistics.mean(pairs):+.2f}" if pairs else "-"


def noise_scale(runs: Sequence[dict[str, Any]], part: tuple[float, float] = (0.5, 1.0)) -> float:
    """The noise scale in examples over this part of the trainings; 0 where there is no run or no signal."""
    notes = [
        (run["noise_unit"] * note["variance"], note["signal"])
        for run in runs
        for note in run["noise"]
        if part[0] * run["steps"] < note["step"] <= part[1] * run["steps"]
    ]
    signal = sum(signal for _, signal in notes)
    return max(0.0, sum(variance for variance, _ in notes)) / signal if signal > 0 else 0.0
