"""docs/resnet9.md and its picture: accuracy against bytes and forecast time, of the trainings done."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.common.forecasts import LINKS
from benchmarks.common.results import Row
from benchmarks.common.tables import spread, table
from benchmarks.gpu.page import BEFORE
from benchmarks.resnet9 import forecast
from benchmarks.resnet9.__main__ import (
    DIVERGED,
    EPOCH,
    METHODS,
    MORE_WORKERS,
    PRESETS,
    SEEDS,
    STEPS,
    WORKERS,
    Run,
    own_rate,
)
from laconic.tools.report.curves import Curve
from laconic.tools.report.picture import framed, panel

DENSE = METHODS[0]
WIDTHS = (64, 16)
HEAD = f"""# ResNet-9 on CIFAR-10

`make docs` writes this page from the results of `python -m benchmarks.resnet9`. Each training is a line of
benchmarks/resnet9/results.jsonl, by width, workers, method, rate, seed and steps.

{WORKERS} workers, or {MORE_WORKERS}, train ResNet-9 for 18 epochs of CIFAR-10 ({STEPS:,} steps of 512 images)
by SGD with Nesterov momentum 0.9, weight decay 5e-4 and label smoothing 0.1, in bf16 autocast. The learning
rate rises for a fifth of the steps and falls to 0. Each method's peak rate is searched by short runs, a fifth
as long and with the first seed. Workers are threads of one process; exchanges and byte counts are those of
`laconic.compress` and `laconic.distribute`. Our images are JPEG copies: compare with dense
training here, not with published accuracies.

*Lost*: points of test accuracy below dense training of the same seeds, mean ± standard error; a row with one
seed supports no claim, and short runs at neighbouring rates often differ by less than seeds do.
*Fewer*: times fewer bytes on the wire than dense training, warm-up included.
*Seconds* of the training over a link of that rate, forecast by `laconic plan` for hosts whose
only core does forward and backward as this machine does alone (`python -m benchmarks.resnet9.forecast`),
without a warm-up and the optimiser's step."""
OURS = {  # rows of the independent run, by our methods
    "dense()": "dense",
    "cgx(bits=4)": "cgx",
    "dgc(density=0.01, warmup_steps={})": "dgc",
    "stc(density=0.01)": "stc, momentum before",
    "topk(density=0.01)": "topk, momentum before",
    "deft(density=0.01)": "deft, momentum before",
    "sketchml(density=0.02)": "sketchml, momentum before",
    "oktopk(density=0.01)": "oktopk, momentum before",
    "powersgd(rank=2)": "powersgd",
    "sign()": "sign, momentum before",
}


def page() -> str:
    """Return the page, of the trainings that are done."""
    lines = [HEAD, ""]
    for width in WIDTHS:
        if not (dense := finished(DENSE, width, WORKERS)):
            continue
        parameters = next(iter(dense.values()))["parameters"]
        lines += [f"## Width {width}, {parameters / 1e6:.2f} million parameters", ""]
        lines += [f"![Test accuracy by bytes and by seconds]({picture_of(width)})", ""]
        for workers in (WORKERS, MORE_WORKERS):
            if found := [*rows(width, workers)]:
                heads = (
                    "method",
                    "rate",
                    "accuracy, %",
                    "lost",
                    "fewer",
                    *seconds_heads(width, workers),
                    "seeds",
                )
                lines += [f"{workers} workers, on {', '.join(machines(width, workers))}:", ""]
                lines += [*table(heads, found), ""]
        lines += [*absent(width), ""]
    return "\n".join([*lines, *independent()])


def trained(method: str, width: int, workers: int) -> dict[int, Row]:
    """Return the full runs of a method at its own rate, by seed."""
    rate = own_rate(method, width)
    if rate is None:
        return {}
    found = {seed: Run(method, rate, seed, workers=workers, width=width).read() for seed in SEEDS}
    return {seed: row for seed, row in found.items() if row is not None}


def finished(method: str, width: int, workers: int) -> dict[int, Row]:
    """Return those of `trained` that have not diverged."""
    return {seed: row for seed, row in trained(method, width, workers).items() if DIVERGED not in row}


def machines(width: int, workers: int) -> list[str]:
    """Return the processors and GPUs of the rows."""
    rows = [row for method in METHODS for row in trained(method, width, workers).values()]
    return sorted({row["machine"].get("gpu", row["machine"]["processor"]) for row in rows})


def rows(width: int, workers: int) -> Iterator[Sequence[str]]:
    """Yield a row for each method that is done."""
    dense = finished(DENSE, width, workers)
    for method in METHODS:
        its, ended = (which(method, width, workers) for which in (trained, finished))
        if not its:
            continue
        rate = f"{next(iter(its.values()))['lr']:g}"
        seconds = seconds_of(method) if seconds_heads(width, workers) else []
        if len(ended) < len(its):
            many = f"diverged with {len(its) - len(ended)} of {len(its)} seeds"
            yield (named(method), rate, many, "", "", *("" for _ in seconds), str(len(its)))
            continue
        lost = [100 * (dense[seed]["accuracy"] - its[seed]["accuracy"]) for seed in its if seed in dense]
        fewer = f"{next(iter(its.values()))['smaller']:.1f} times"
        yield (
            named(method),
            rate,
            spread([100 * row["accuracy"] for row in its.values()]),
            *(("", "") if method == DENSE else (spread(lost) if lost else "", fewer)),
            *seconds,
            str(len(its)),
        )


def named(method: str) -> str:
    """Return a method as it is written for a full run."""
    return f"`{Run(method, 1.0).spec}`"


def forecasts() -> Row:
    """Return the forecasts of seconds, or nothing if there are none."""
    found: Row = json.loads(forecast.FILE.read_text()) if forecast.FILE.exists() else {}
    return found


def seconds_heads(width: int, workers: int) -> tuple[str, ...]:
    """Return the heads of the forecast columns, which one width and number of workers have."""
    if (width, workers) != (forecast.WIDTH, WORKERS) or not forecasts():
        return ()
    return tuple(f"seconds, {link}" for link in LINKS)


def seconds_of(method: str) -> list[str]:
    """Return the forecast seconds of a training over each link."""
    steps = forecasts()["step_s"].get(method, {})
    return [f"{STEPS * steps[link]:.0f}" if link in steps else "" for link in LINKS]


def absent(width: int) -> list[str]:
    """Return a sentence on what is not done."""
    lacking = [named(method) for method in METHODS if not trained(method, width, WORKERS)]
    some = [
        f"{named(method)}: {len(its)} of {len(SEEDS)} seeds"
        + (f" by {MORE_WORKERS} workers" if workers == MORE_WORKERS else "")
        for workers in (WORKERS, MORE_WORKERS)
        for method in PRESETS
        if len(its := trained(method, width, workers)) < len(SEEDS) and named(method) not in lacking
    ]
    parts = [f"Not done yet: {', '.join(lacking)}."] if lacking else []
    return [*parts, *([f"Not complete: {'; '.join(some)}."] if some else [])]


def independent() -> Iterator[str]:
    """Yield a comparison with the independent implementation on an H200."""
    old = json.loads(BEFORE.read_text())["training"]
    yield "## Compared with an independent implementation"
    yield ""
    yield f"{old['about'][0].upper()}{old['about'][1:]}. Peak learning rate 0.4 for all methods, on an H200."
    yield "Points below its own dense training there, and here, at each width that is done:"
    yield ""
    widths = [width for width in WIDTHS if finished(DENSE, width, WORKERS)]
    found = []
    for method, name in OURS.items():
        if method == DENSE or not any(trained(method, width, WORKERS) for width in widths):
            continue
        there = old["accuracy"]["dense"] - old["accuracy"][name]
        here = [of_first(method, width) for width in widths]
        found.append((named(method), f"{there:.2f}", *here))
    yield from table(("method", "there", *(f"width {width}" for width in widths)), found)
    yield ""


def of_first(method: str, width: int) -> str:
    """Return the points lost with the first seed."""
    its, dense = finished(method, width, WORKERS), finished(DENSE, width, WORKERS)
    if SEEDS[0] not in its or SEEDS[0] not in dense:
        return ""
    return f"{100 * (dense[SEEDS[0]]['accuracy'] - its[SEEDS[0]]['accuracy']):.2f}"


def picture_of(width: int) -> str:
    """Return the name of a width's picture."""
    return f"resnet9-{width}.svg"


def pages(folder: Path) -> dict[Path, Callable[[], str]]:
    """Return what writes the page and draws its pictures; nothing before dense training is done."""
    widths = [width for width in WIDTHS if finished(DENSE, width, WORKERS)]
    drawn = {folder / picture_of(width): lambda width=width: picture(width) for width in widths}
    return {folder / "resnet9.md": page, **drawn} if widths else {}


def picture(width: int) -> str:
    """Draw test accuracy after each epoch, by MB that a worker has sent and by seconds over 100 Mbit/s."""
    shown = [method for method in METHODS if curves(method, width, 1.0).x.size]
    by_bytes = [curves(method, width, sent(method, width)) for method in shown]
    panels = [panel(by_bytes, 56, "by MB sent per worker", log_x=True, log_y=False)]
    link, steps = LINKS[0], forecasts().get("step_s", {})
    if width == forecast.WIDTH and steps:
        by_time = [curves(method, width, EPOCH * steps.get(method, {}).get(link, 0.0)) for method in shown]
        panels.append(panel(by_time, 482, f"by forecast seconds over {link}", log_x=True, log_y=False))
    specs = [named(method).strip("`") for method in shown]
    return framed(
        "Test accuracy of ResNet-9 by bytes and by time", "Test accuracy, %, first seed", panels, specs
    )


def sent(method: str, width: int) -> float:
    """Return the MB that a worker sends in an epoch: a mean, also of a training with a warm-up."""
    row = trained(method, width, WORKERS)[SEEDS[0]]
    return float(row["sent_mb"]) * EPOCH / STEPS


def curves(method: str, width: int, each: float) -> Curve:
    """Return the accuracy after each epoch against so much an epoch; nothing if it is not known."""
    row = trained(method, width, WORKERS).get(SEEDS[0], {})
    percent = 100 * np.array(row.get("accuracies", []) if each else [], dtype=np.float64)
    return Curve(each * np.arange(1, len(percent) + 1), percent, np.zeros_like(percent))
