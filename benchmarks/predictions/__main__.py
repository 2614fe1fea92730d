"""The planner compared with the lab: seconds of a step as forecast by `laconic plan` and as measured.

    python -m benchmarks.predictions                 of steps/results.json; writes predictions/results.json
    python -m benchmarks.predictions --of FILE       of another file of `benchmarks.steps`; writes with --out
    python -m benchmarks.predictions --quick         few methods; writes only with --out

Links and a step with no communication were probed on the same hosts, before any method was timed; what a
method sends and computes is rehearsed here, in threads. So no forecast has seen a step of its method. The
machine's speed varies from minute to minute: computing is scaled to the steps with no communication that
were measured next to the method's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.machine import machine
from benchmarks.steps.__main__ import RESULTS as STEPS
from benchmarks.steps.contenders import AUTO, DENSE, DGC, OURS, WHOLE
from laconic.core.layout import Layout
from laconic.exchange.method import lift
from laconic.tools.plan.network import Network
from laconic.tools.plan.rehearsal import rehearse
from laconic.tools.plan.step import Work, time_line

RESULTS = Path(__file__).with_name("results.json")
NEAR, GOOD = 0.2, 8 / 10  # bars: how far a forecast may be off, and the share that may not be farther
SPECS = {DENSE: "dense()"} | {name: name.removesuffix(WHOLE) for name in OURS if name != AUTO}
Row = dict[str, Any]


def main() -> None:
    """Forecast, print a line a pair, write the JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.predictions")
    parser.add_argument("--quick", action="store_true", help="few methods; writes only with --out")
    parser.add_argument("--of", type=Path, default=STEPS, help="a file of benchmarks.steps")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    given = parser.parse_args()
    if not given.of.exists():
        raise SystemExit(f"there is no {given.of}: run `python -m benchmarks.steps` first")
    measured = json.loads(given.of.read_text())
    names = (DENSE, DGC) if given.quick else tuple(SPECS)
    rows = [row for workload in measured["workloads"] for row in compared(workload, names)]
    for row in rows:
        print(
            f"{row['workload']:6} {row['link']:>7}  {row['contender']:30} {row['forecast_s']:7.3f} s"
            f" forecast, {row['measured_s']:7.3f} s measured  {row['error']:+.0%}"
        )
    near = sum(abs(row["error"]) <= NEAR for row in rows)
    print(f"{near} of {len(rows)} within {NEAR:.0%}")
    if out := given.out or (None if given.quick or given.of != STEPS else RESULTS):
        found = {"machine": machine(), "near": NEAR, "rows": rows}
        out.write_text(json.dumps(found, indent=1) + "\n")


def compared(workload: Row, names: Sequence[str]) -> list[Row]:
    """A row for each method and link that was measured."""
    told = dict(workload["work"])
    layout = Layout.of((name, tuple(shape)) for name, shape in told.pop("layout"))
    work = Work(**(told | {key: tuple(told[key]) for key in ("buckets", "ready")}))
    specs = {SPECS[name]: lift(SPECS[name]) for name in names}
    rehearsed = dict(zip(specs, rehearse(specs.values(), layout), strict=True))
    rows = []
    for row in workload["rows"]:
        if (name := row["contender"]) not in names:
            continue
        cut = whole(work) if name.endswith(WHOLE) else work
        network = Network(**workload["networks"][row["link"]])
        split = time_line(as_slow(cut, row["alone_s"]), rehearsed[SPECS[name]], network, workload["hosts"])
        error = split.step_s / row["step_s"] - 1
        figures = {"forecast_s": split.step_s, "measured_s": row["step_s"], "error": error}
        place = {"workload": workload["name"], "link": row["link"], "contender": name}
        rows.append(place | figures | {"efficiency": split.efficiency})
    return rows


def as_slow(work: Work, alone_s: float) -> Work:
    """The same computing where a step of it takes so long."""
    slower = alone_s / work.alone_s
    seconds = {key: slower * getattr(work, key) for key in ("forward_s", "backward_s", "update_s")}
    return replace(work, **seconds)


def whole(work: Work) -> Work:
    """The same computing, with all gradients in one bucket."""
    return replace(work, buckets=(sum(work.buckets),), ready=(1.0,))


if __name__ == "__main__":
    main()
