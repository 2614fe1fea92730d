"""docs/pipelines_measured.md and its picture, from benchmarks/pipeline/results.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.common.tables import table
from benchmarks.pipeline import __main__ as pipeline
from benchmarks.pipeline.workloads import BETWEEN, CROSSINGS, DENSE, OURS
from laconic.tools.report.curves import Curve
from laconic.tools.report.picture import framed, panel

NAMES = {spec.replace(" ", ""): name for name, spec in CROSSINGS.items()}
Row = dict[str, Any]
HEAD = """# Pipelines, measured

`make docs` writes this page from the results of `python -m benchmarks.pipeline`. It compares [AC-SGD between
pipeline stages](pipelines.md) with float32, half precision, and the same bits without memory ("direct").
*4/8*: 4 bits per activation, 8 bits per gradient."""


def page() -> str:
    """The whole page."""
    speed, loss = rows("speed"), rows("loss")
    lines = [HEAD]
    for part in (_fast(speed), _replicas(speed), _forecasts(speed), _computed(speed), _loss(loss)):
        found = [*part]
        lines += ["", *found] if found else []
    return "\n".join([*lines, ""])


def rows(part: str) -> list[Row]:
    """The rows of a part."""
    return pipeline.RUNS.rows(part)


def name_of(spec: str) -> str:
    """How a spec is called here."""
    return NAMES.get(spec.replace(" ", ""), spec)


def pick(found: list[Row], **wanted: Any) -> Row | None:
    """The row of these values."""
    return next((row for row in found if all(row[key] == value for key, value in wanted.items())), None)


def against(row: Row | None, *others: Row | None) -> str:
    """`seconds (times faster than each of the others)`: those that were measured before it in this order."""
    if row is None:
        return "-"
    before = others[: others.index(row)] if row in others else others
    times = [f"{other['step_s'] / row['step_s']:.1f} x" for other in before if other is not None]
    return f"{row['step_s']:.2f}" + (f" ({', '.join(times)})" if times else "")


def _fast(speed: list[Row]) -> Iterator[str]:
    found = [row for row in speed if row["workload"] == "fast" and row["replicas"] == 1]
    if not found:
        return
    about, rounds = found[0], max(len(row["steps_s"]) for row in found)
    yield from ("## Step time", "")
    windows, micro = about["batch"], about["micro_batches"]
    yield "GPT of 10.8 million parameters, 6 layers 384 wide, windows of 256 letters, a stage on each host,"
    yield f"each with its own emulated link. {windows} windows a step in {micro} micro-batches, 1F1B, all"
    yield "samples visited before. Computing these layers takes this machine longer than sending their"
    yield "activations, which would hide most of the gain. So nothing is computed here: a stage"
    yield f"sleeps as long as a fast worker would compute, {about['about']}."
    yield "Messages and coding are real."
    yield ""
    yield f"Seconds of a step, median of {rounds} round{'s' * (rounds != 1)}"
    yield f"({about['machine']['processor']}, {about['machine']['cores']} cores, shared). In brackets, how"
    yield "many times faster that is than *dense*, torch's own pipeline, whose 1F1B over gloo sends in one"
    yield "direction at a time; and than *dense, receives first*, which sends the same float32 by our stages,"
    yield "both ways at once. The second number is the gain of compression."
    if rounds == 1:
        yield "This is a single round: other load on the machine affects single figures."
    yield ""
    columns = sorted({(row["stages"], row["link"]) for row in found if row["schedule"] == "1f1b"})
    cells = []
    for name, spec in CROSSINGS.items():
        picked = [_of(found, spec, stages=stages, link=link, schedule="1f1b") for stages, link in columns]
        plain, ours = (
            [_of(found, float32, stages=stages, link=link, schedule="1f1b") for stages, link in columns]
            for float32 in (DENSE, OURS)
        )
        megabytes = next((sum(row["sent"]) / 1e6 for row in picked if row is not None), None)
        sent = "-" if megabytes is None else f"{megabytes:.1f}"
        cells.append([name, sent, *(against(*each) for each in zip(picked, plain, ours, strict=True))])
    heads = [f"{stages} stages, {link.replace('mbit', ' Mbit/s')}" for stages, link in columns]
    yield from table(("between stages", f"MB a step, {columns[0][0]} stages", *heads), cells)


def _of(found: list[Row], spec: str, **wanted: Any) -> Row | None:
    alike = [row for row in found if name_of(row["spec"]) == name_of(spec)]
    return pick(alike, **wanted)


def _replicas(speed: list[Row]) -> Iterator[str]:
    found = [row for row in speed if row["replicas"] > 1]
    if not found:
        return
    links = sorted({row["link"] for row in found})
    yield from ("## With replicas", "")
    yield "Two replicas of two stages: equal stages exchange the gradients of their weights by a method. In"
    yield "brackets, times faster than without compression."
    yield ""
    cells = []
    for between, called in BETWEEN.items():
        for name, spec in CROSSINGS.items():
            picked = [_of(found, spec, between=between, link=link) for link in links]
            if all(row is None for row in picked):
                continue
            dense = [_of(found, DENSE, between=DENSE, link=link) for link in links]
            times = (against(*pair) for pair in zip(picked, dense, strict=True))
            cells.append([name, called, *times])
    yield from table(
        ("between stages", "between replicas", *(link.replace("mbit", " Mbit/s") for link in links)), cells
    )


def _forecasts(speed: list[Row]) -> Iterator[str]:
    found = [row for row in speed if row["workload"] == "fast" and row["replicas"] == 1]
    if not found:
        return
    yield from ("## Forecast and measured", "")
    yield "`laconic plan --stages` forecasts bytes and seconds from a rehearsal of one message. The table"
    yield "compares it with measurements: megabytes that leave the first and the last host per step, by the"
    yield "model of packets and by the counters of their interfaces; and seconds, given the mean time in"
    yield "which the stages of that row computed and encoded."
    yield ""
    cells, ratios, bytes_off = [], [], []
    for row in sorted(found, key=lambda row: (row["stages"], row["schedule"], row["link"], _place(row))):
        case = pipeline.Case.of(row)
        sent = pipeline.later_visit(case.spec, case.workload).sent(row["micro_batches"])
        counted = row["sent"][0], row["sent"][-1]
        forecast_s = pipeline.forecast(case, row) or 0.0
        ratios.append(forecast_s / row["step_s"])
        bytes_off += [told / seen - 1 for told, seen in zip(sent, counted, strict=True)]
        cells.append(
            [
                str(case.stages),
                case.schedule,
                case.link.replace("mbit", " Mbit/s"),
                name_of(case.spec),
                " / ".join(f"{nbytes / 1e6:.2f}" for nbytes in sent),
                " / ".join(f"{nbytes / 1e6:.2f}" for nbytes in counted),
                f"{forecast_s:.2f}",
                f"{row['step_s']:.2f}",
            ]
        )
    heads = ("stages", "schedule", "link", "between stages", "MB forecast", "MB counted")
    yield from table((*heads, "s forecast", "s measured"), cells)
    yield ""
    most, least = max(bytes_off), min(bytes_off)
    yield f"Bytes are forecast {100 * least:.1f} to {100 * most:.1f} % above the counters: late receivers"
    yield "acknowledge less often than every second packet."
    low, high, middle = min(ratios), max(ratios), statistics.median(ratios)
    yield f"Seconds are {low:.2f} to {high:.2f} of those measured, {middle:.2f} in the median:"
    yield "the time line has a core for each worker, but here all workers and other processes shared two."


def _place(row: Row) -> int:
    return [*CROSSINGS].index(name_of(row["spec"]))


def _computed(speed: list[Row]) -> Iterator[str]:
    found = [row for row in speed if row["workload"] == "computed"]
    if not found:
        return
    yield from ("## Computed by two cores", "")
    yield "The same GPT with every layer computed, two stages: computation on two cores hides most messages."
    yield "In brackets, times faster than dense, and than dense, receives first."
    yield ""
    cells = []
    for row in sorted(found, key=lambda row: (row["link"], row["spec"] != DENSE)):
        float32 = [_of(found, spec, link=row["link"]) for spec in (DENSE, OURS)]
        cells.append([row["link"].replace("mbit", " Mbit/s"), name_of(row["spec"]), against(row, *float32)])
    yield from table(("link", "between stages", "step, s"), cells)


def _loss(loss: list[Row]) -> Iterator[str]:
    if not loss:
        return
    one = loss[0]["settings"]
    epochs = loss[0]["steps"][-1] * one["batch"] // one["examples"]
    yield from ("## Loss", "")
    link = one["link"].replace("mbit", " Mbit/s")
    yield f"A smaller GPT (`{one['model']}`: 3 layers, 128 wide, windows of 64) in two stages, over a fixed"
    yield f"set of {one['examples']} windows, {epochs} epochs in batches of {one['batch']}, links of {link},"
    yield "SGD with Nesterov momentum at the task's rate."
    yield "Loss of the last epoch and on the test set: mean over seeds and standard deviation. Seconds:"
    yield "median over seeds, here and in the picture. Tests run without compression."
    if len({row["seed"] for row in loss}) == 1:
        yield "There is one seed, and trainings ran in parallel with other work: compare losses, not seconds."
    yield ""
    cells = []
    for name, spec in CROSSINGS.items():
        each = [row for row in loss if name_of(row["spec"]) == name_of(spec)]
        if each:
            figures = [_spread([row[key] for row in each]) for key in ("train_loss", "test_loss")]
            seconds = statistics.median(row["seconds"][-1] for row in each)
            cells.append([name, *figures, f"{seconds:.0f}", str(len(each))])
    yield from table(("between stages", "training loss", "test loss", "seconds", "seeds"), cells)
    yield ""
    yield "![Loss by steps and by seconds](pipelines.svg)"


def _spread(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{spread}"


def picture() -> str:
    """Loss, mean over seeds, against steps and against seconds, median over seeds, as an SVG."""
    loss = rows("loss")
    by_step, by_second, shown = [], [], []
    for name, spec in CROSSINGS.items():
        each = [row for row in loss if name_of(row["spec"]) == name_of(spec)]
        if each:
            shown.append(name)
            mean = np.mean([row["loss"] for row in each], axis=0)
            none = np.zeros_like(mean)
            by_step.append(Curve(np.array(each[0]["steps"], dtype=np.float64), mean, none))
            by_second.append(Curve(np.median([row["seconds"] for row in each], axis=0), mean, none))
    title = "Two stages over links of 10 Mbit/s, the same windows in every epoch"
    panels = [
        panel(by_step, 56, "training loss by step", log_x=False),
        panel(by_second, 482, "training loss by seconds", log_x=False),
    ]
    return framed(f"{title}: training loss by step and by seconds", title, panels, shown)
