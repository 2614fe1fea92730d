"""Seconds of a training step over slow links: our methods, PyTorch's, and what users write.

    python -m benchmarks.steps                    two workloads and links; writes results.json: 40 min
    python -m benchmarks.steps --link free        a link that holds nothing back; writes unshaped.json
    python -m benchmarks.steps --hook             next to a hook that does nothing; writes hook.json: 25 min
    python -m benchmarks.steps --quick            one of each, a few contenders, 2 steps; keeps nothing
    python -m benchmarks.steps --workload gpt --only "dgc(density=0.001)" --rounds 1 --out FILE

Each rank is a process with one thread on a host of a lab (`laconic.tools.lab`). A step is forward, backward,
exchange and `optimizer.step()`, with SGD of momentum 0.9 for all. In every round each contender gets a new
model, warms up on an unlimited link, and is timed on each link; so other load on the machine affects all
alike. A round's figure is the slowest rank's median step; the result is the median over rounds. Efficiency
is the time of a step with no communication divided by this: such steps are timed next to each contender, as
a shared machine varies in speed, and a round's median counts. Needs what `laconic lab` needs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.common.machine import machine
from benchmarks.steps import installed
from benchmarks.steps.contenders import (
    ALONE,
    AUTO,
    DENSE,
    DGC,
    FETCHED,
    GOALS,
    NOTHING,
    OURS,
    PEERS,
    POWERSGD,
    SETTLE,
    WHOLE,
)
from benchmarks.steps.workloads import WORKLOADS, Workload
from laconic.core.errors import LabError
from laconic.tools.lab import Lab, Link, missing
from laconic.tools.lab.link import FREE

RESULTS = Path(__file__).with_name("results.json")
ROOT = Path(__file__).parents[2]
UNSHAPED, HOOK = (RESULTS.with_name(name) for name in ("unshaped.json", "hook.json"))
LINKS = ("1gbit", "100mbit")
SLOW_WORKLOADS, FREE_WORKLOADS = ("gpt", "square"), ("gpt", "square", "digits")
HOOK_WORKLOADS = ("gpt", "gpt-4")
CONTENDERS = (*(name for name in PEERS if name != NOTHING), *OURS)
BESIDE_HOOK = (ALONE, NOTHING, *(name + buckets for name in GOALS for buckets in ("", WHOLE)))
QUICK = (ALONE, DENSE, POWERSGD, "plain torch DGC", DGC)
WARM_UP = 4  # DDP regroups its buckets after the first step, and PowerSGD's hook begins with the third
MOST, LEAST, LONG_S = 16, 2, 5.0  # timed steps, and how long they should take at most
ROUNDS = 3
LIMIT_S = 600  # of one answer
EFFICIENT = {"gpt": 0.88, "square": 0.55}  # bars: of the step without communication over DGC's
FASTER = {"gpt": 12, "square": 30}  # times faster than dense on the slowest link
SLOW = "100mbit"
OVERHEAD = 0.5  # of PowerSGD's, on the GPT
BEHIND = 1.15  # times the best method of a fixed kind, for auto()
AS_FAST = {AUTO: 1.03, DGC: 1.10}  # times dense at most, where the link holds nothing back
Row = dict[str, Any]


def main() -> None:
    """Measure, print a line a figure, write the JSON."""
    given = options()
    if reason := missing():
        print(f"skipped: {reason}")
        return
    usual_names = QUICK if given.quick else BESIDE_HOOK if given.hook else CONTENDERS
    names = [each for each in usual_names if not given.only or each in given.only]
    names += [each for each in given.only if each not in names]
    names = list(dict.fromkeys((ALONE, *names)))
    fetched = [name for name in FETCHED if name in names]
    reason = installed.install() if fetched else None
    absent = dict.fromkeys(fetched, reason) if reason else {}
    for name, why in absent.items():
        print(f"without {name}: {why}")
        names.remove(name)
    is_free = given.link == [FREE]
    usual = HOOK_WORKLOADS if given.hook else FREE_WORKLOADS if is_free else SLOW_WORKLOADS
    workloads = [WORKLOADS[name] for name in given.workload or (["gpt"] if given.quick else usual)]
    links = given.link or (LINKS[:1] if given.quick else LINKS)
    found = [
        measure(each, links, names, given.rounds, MOST if not given.quick else LEAST) for each in workloads
    ]
    kept = HOOK if given.hook else UNSHAPED if is_free else RESULTS
    if out := given.out or (None if given.quick or given.only else kept):
        about = {"machine": machine(), "rounds": given.rounds, "threads": 1, "seed": 0, "absent": absent}
        before = json.loads(out.read_text()) if out.exists() else {"workloads": []}
        workloads = found + earlier(before, {each["name"] for each in found})
        out.write_text(json.dumps(about | {"workloads": workloads}, indent=1) + "\n")


def earlier(before: Row, again: Collection[str]) -> list[Row]:
    """The workloads of a file that were not measured again, with the machine and rounds of their own."""
    about = {"machine": before.get("machine"), "rounds": before.get("rounds")}
    return [{"earlier": about} | each for each in before["workloads"] if each["name"] not in again]


def options() -> argparse.Namespace:
    """What is to be measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.steps")
    parser.add_argument("--quick", action="store_true", help="a pass of a minute; writes only with --out")
    parser.add_argument("--workload", action="append", choices=[*WORKLOADS], help="may be repeated")
    parser.add_argument("--link", action="append", help="a rate; may be repeated")
    parser.add_argument("--hook", action="store_true", help="next to a hook that does nothing")
    parser.add_argument("--only", action="append", default=[], help="a contender or a spec; may be repeated")
    parser.add_argument("--rounds", type=int, help=f"[default: {ROUNDS}]")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    given = parser.parse_args()
    given.rounds = given.rounds or (1 if given.quick else ROUNDS)
    return given


def measure(workload: Workload, links: Sequence[str], names: Sequence[str], rounds: int, most: int) -> Row:
    """All contenders on one workload: figures by link, and what a probe says of the same hosts."""
    cells: dict[tuple[str, str], list[Row]] = {(link, name): [] for link in links for name in names}
    with Lab(workload.hosts) as lab, Ranks(lab, workload.name) as ranks:
        work = ranks.ask(do="work")[0]
        entries = sum(math.prod(shape) for _, shape in work["layout"])
        copy_s = slowest(ranks.ask(do="copies", entries=entries, count=most))
        networks = {link: ranks.over(link, do="network")[0] for link in links}
        for number in range(rounds):
            for name in names:
                ranks.over(None, do="build", contender=name, steps=WARM_UP)
                for link in links:
                    cells[link, name].append(beside_alone(ranks, name, link, most))
                    line(workload, link, name, number, cells)
    rows = [summary(link, name, cells) for link, name in cells]
    return {
        "name": workload.name,
        "hosts": workload.hosts,
        "about": workload.about,
        "work": work,
        "copy_s": copy_s,
        "networks": networks,
        "rows": rows,
    }


def beside_alone(ranks: Ranks, name: str, link: str, most: int) -> Row:
    """What `timed` tells of a contender, and `alone_s`, a step without communication at the same time."""
    alone = slowest(ranks.ask(do="alone", count=most // 2))
    row = timed(ranks, link, most, SETTLE.get(name, 1))
    return row | {"alone_s": alone}


def timed(ranks: Ranks, link: str | None, most: int, settle: int = 1) -> Row:
    """The slowest rank's median step over a link, and what a step costs, on the average over ranks.

    The first `settle` steps do not count: they fill the link's queue, and tell a method how fast it is.
    """
    first = max(each["seconds"][-1] for each in ranks.over(link, do="steps", count=settle))
    told = ranks.ask(do="steps", count=int(min(max(LONG_S / first, LEAST), most)))
    figures = {key: statistics.mean(each[key] for each in told) for key in told[0] if key != "seconds"}
    return {"step_s": slowest(told)} | figures


def slowest(told: Sequence[Row]) -> float:
    """The largest of the ranks' median steps."""
    return max(statistics.median(each["seconds"]) for each in told)


def summary(link: str, name: str, cells: dict[tuple[str, str], list[Row]]) -> Row:
    """Medians over rounds; each round's efficiency is against the same round without communication."""
    found = cells[link, name]
    rounds = zip(*(rows for (over, _), rows in cells.items() if over == link), strict=True)
    alone = [statistics.median(row["alone_s"] for row in rows) for rows in rounds]
    steps = alone if name == ALONE else [row["step_s"] for row in found]
    efficiencies = [idle / step for idle, step in zip(alone, steps, strict=True)]
    return {
        "link": link,
        "contender": name,
        "efficiency": statistics.median(efficiencies),
        "efficiencies": efficiencies,
        "steps_s": steps,
        **{key: statistics.median(row[key] for row in found) for key in found[0]},
        "step_s": statistics.median(steps),
        "alone_s": statistics.median(alone),
    }


def line(
    workload: Workload, link: str, name: str, number: int, cells: dict[tuple[str, str], list[Row]]
) -> None:
    """A figure, for the eye."""
    row = cells[link, name][number]
    efficiency = row["alone_s"] / row["step_s"]
    coding = "".join(
        f"  {key[:-2]} {1e3 * row[key]:.0f}"
        for key in ("encode_s", "communicate_s", "decode_s")
        if key in row
    )
    print(
        f"{workload.name:6} {link:>7}  {name:24} {row['step_s']:7.3f} s  {efficiency:.2f}"
        f"  {row['sent'] / 1e6:8.3f} MB  processor {row['processor_s']:.3f} s{coding}",
        flush=True,
    )


class Ranks:
    """One process on each host of a lab, which does what it is told."""

    def __init__(self, lab: Lab, workload: str, module: str = "benchmarks.steps.rank") -> None:
        self.lab, self._workload, self._module = lab, workload, module
        self._ends = ExitStack()
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Ranks:
        cores = (os.cpu_count() or 1) / self.lab.hosts
        command = [sys.executable, "-m", self._module, self._workload, str(cores)]
        path = os.pathsep.join(map(str, (ROOT, installed.folder())))
        fixed = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": path}
        for host in range(self.lab.hosts):
            environment = self.lab.place(host) | fixed
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = self._ends.enter_context(self.lab.start(host, command, env=environment, **pipes))
            self._processes.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._tell({"do": "end"})
            else:
                self._kill()
        finally:
            self._ends.close()

    def over(self, link: str | None, **told: Any) -> list[Row]:
        """The answers of all ranks, with links of this rate from now on; None: that hold nothing back."""
        self.lab.reshape(Link(link))
        return self.ask(**told)

    def ask(self, **told: Any) -> list[Row]:
        """The answers of all ranks. Raises `LabError` where one has ended, or takes too long."""
        watch = threading.Timer(LIMIT_S, self._kill)
        watch.start()
        try:
            self._tell(told)
            answers = [process.stdout.readline() for process in self._processes if process.stdout]
        finally:
            watch.cancel()
        if not all(answers):
            raise LabError(
                f"a rank has ended at {told}, or took longer than {LIMIT_S} s: what it said is above"
            )
        return [json.loads(each) for each in answers]

    def _tell(self, told: Row) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(told) + "\n")
            process.stdin.flush()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


if __name__ == "__main__":
    main()
