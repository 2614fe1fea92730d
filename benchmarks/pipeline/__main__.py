"""Pipelines over slow links: seconds of a step, and loss against steps and seconds.

    python -m benchmarks.pipeline                 all parts; goes on where it stopped
    python -m benchmarks.pipeline --part speed    step times: 20 min
    python -m benchmarks.pipeline --part loss     trainings: 6 ways x 3 seeds, 1 to 4 minutes each
    python -m benchmarks.pipeline --part loss --only "AC-SGD 4/8" --seeds 1
    python -m benchmarks.pipeline --quick         a few steps of each part; keeps nothing
    python -m benchmarks.pipeline --out FILE      store the rows in another file

Each stage is a process with one thread on a host of `laconic.tools.lab`, so each has its own link. Speed:
the GPT of 10.8 million parameters (`pipeline_workloads.py` says how workers may be faster than this machine),
whose samples have all been visited. `dense()` is torch's own pipeline; `direct(dense(), backward=dense())`
sends the same floats by our stages, which post receives first, and so is the fair baseline. A round's figure
is the mean step between two barriers, and the result the median over rounds. `forecast_s` is the time line of
`laconic.tools.plan.pipeline`, for what the stages of that row compute and the bytes in the forecast.
A case of fewer rounds than asked for is measured again. Loss: a smaller GPT in two stages, over a fixed set
of windows for several epochs, on links of 10 Mbit/s; seconds are those of its own steps.
Needs what `laconic lab` needs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path

from benchmarks.common.machine import machine
from benchmarks.common.results import Results, Row
from benchmarks.pipeline import loss as pipeline_loss
from benchmarks.pipeline.workloads import AC48, BETWEEN, CROSSINGS, DENSE, OURS, WIDTH, WINDOW, WORKLOADS
from benchmarks.steps.__main__ import Ranks
from laconic.core.units import bits_a_second
from laconic.pipeline.crossing import crossing
from laconic.tools.lab import Lab, missing
from laconic.tools.plan.boundary import Visited, rehearse_crossing
from laconic.tools.plan.network import Network
from laconic.tools.plan.pipeline import StageWork, pipeline_step
from laconic.tools.report.ledger import slug

RUNS = Results(Path(__file__).with_name("results.jsonl"))
LINKS = ("100mbit", "500mbit")
ROUNDS, LONG_S, MOST, LEAST = 3, 8.0, 20, 2


@dataclass(frozen=True)
class Case:
    """One pipeline over one link."""

    workload: str
    stages: int
    link: str
    spec: str
    replicas: int = 1
    between: str = DENSE
    schedule: str = "1f1b"

    @property
    def hosts(self) -> int:
        """One a stage of each replica."""
        return self.stages * self.replicas

    @classmethod
    def of(cls, row: Row) -> Case:
        """The case of a row."""
        return cls(**{each.name: row[each.name] for each in fields(cls)})

    @property
    def key(self) -> str:
        replicas = "" if self.replicas == 1 else f"-{self.replicas}-{slug(self.between)}"
        case = f"{self.workload}-{self.stages}{replicas}-{self.schedule}-{self.link}"
        return f"speed/{case}-{slug(self.spec)}"


def cases(quick: bool) -> list[Case]:
    """All of them."""
    if quick:
        return [Case("fast", 2, "100mbit", spec) for spec in (DENSE, OURS, AC48)]
    found = [
        Case("fast", stages, link, spec) for stages in (2, 4) for link in LINKS for spec in CROSSINGS.values()
    ]
    found += [
        Case("fast", 2, link, spec, 2, between)
        for link in LINKS
        for spec in (DENSE, AC48)
        for between in BETWEEN
    ]
    found += [Case("fast", 2, LINKS[0], spec, schedule="gpipe") for spec in (DENSE, OURS, AC48)]
    found += [Case("computed", 2, link, spec) for link in LINKS for spec in (DENSE, OURS, AC48)]
    return found


def main() -> None:
    """Measure, print a line a figure, store a row a run."""
    given = options()
    if reason := missing():
        print(f"skipped: {reason}")
        return
    if given.part in (None, "speed"):
        speed(Results(given.out), given.quick, given.rounds)
    if given.part in (None, "loss"):
        pipeline_loss.measure(Results(given.out), given.quick, given.only, given.seeds)


def options() -> argparse.Namespace:
    """What is to be measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.pipeline")
    parser.add_argument("--part", choices=("speed", "loss"), help="[default: both]")
    parser.add_argument("--quick", action="store_true", help="a pass of two minutes; keeps nothing")
    parser.add_argument("--rounds", type=int, help=f"of the part speed [default: {ROUNDS}]")
    parser.add_argument(
        "--only", action="append", default=[], choices=pipeline_loss.WAYS, help="of loss; may be repeated"
    )
    parser.add_argument(
        "--seeds", type=int, default=pipeline_loss.SEEDS, help="of loss [default: %(default)s]"
    )
    parser.add_argument("--out", type=Path, default=RUNS.file, help="the file of the results")
    given = parser.parse_args()
    given.rounds = given.rounds or (1 if given.quick else ROUNDS)
    return given


def speed(runs: Results, quick: bool, rounds: int) -> None:
    """Step times of all cases that are not kept yet, a lab for each number of hosts."""
    due = [case for case in cases(quick) if quick or not done(runs.get(case.key), rounds)]
    for workload, hosts in dict.fromkeys((case.workload, case.hosts) for case in due):
        group = [case for case in due if (case.workload, case.hosts) == (workload, hosts)]
        with Lab(hosts) as lab, Ranks(lab, workload, "benchmarks.pipeline.rank") as ranks:
            for case, row in measured(group, ranks, rounds, LEAST if quick else MOST):
                if not quick:
                    runs.put(case.key, row)


def done(row: Row | None, rounds: int) -> bool:
    """Whether a case has been measured in so many rounds."""
    return row is not None and len(row["steps_s"]) >= rounds


def measured(group: list[Case], ranks: Ranks, rounds: int, most: int) -> Iterator[tuple[Case, Row]]:
    """Each case, as soon as all its rounds are done. Cases of one link are measured round by round."""
    for link in dict.fromkeys(case.link for case in group):
        alike = [case for case in group if case.link == link]
        found: dict[Case, list[Row]] = {case: [] for case in alike}
        for number in range(rounds):
            for case in alike:
                found[case].append(one_round(case, ranks, most))
                line(case, number, found[case][-1])
        for case in alike:
            yield case, summary(case, found[case])


def one_round(case: Case, ranks: Ranks, most: int) -> Row:
    """A new pipeline: first visits on a free link, then steps on the case's link."""
    told = {"spec": case.spec, "stages": case.stages, "replicas": case.replicas}
    ranks.over(None, do="build", **told, between=case.between, schedule=case.schedule)
    ranks.ask(do="steps", count=2)
    settled = ranks.over(case.link, do="steps", count=1)
    first_s = max(each["whole_s"] for each in settled)
    every = ranks.ask(do="steps", count=int(min(max(LONG_S / first_s, LEAST), most)))
    names = ("forward_s", "backward_s", "encode_s", "decode_s", "up", "down", "sent")
    row = {"step_s": max(each["whole_s"] for each in every)}
    return row | {name: [each[name] for each in every] for name in names}


def summary(case: Case, rows: list[Row]) -> Row:
    """What is kept of a case."""
    middle = sorted(rows, key=lambda row: row["step_s"])[len(rows) // 2]
    steps = [row["step_s"] for row in rows]
    about = {"step_s": statistics.median(steps), "steps_s": steps, "forecast_s": forecast(case, middle)}
    workload = WORKLOADS[case.workload]
    size = {"about": workload.about, "batch": workload.batch, "micro_batches": workload.micro_batches}
    return (
        asdict(case)
        | about
        | {k: v for k, v in middle.items() if k != "step_s"}
        | size
        | {"machine": machine()}
    )


def forecast(case: Case, row: Row) -> float | None:
    """The time line's step for a pipeline without replicas; None with them."""
    if case.replicas > 1:
        return None
    micro, boundaries = WORKLOADS[case.workload].micro_batches, case.stages - 1
    stages = [
        StageWork(forward / micro, backward / micro)
        for forward, backward in zip(row["forward_s"], row["backward_s"], strict=True)
    ]
    messages = 2 * boundaries * micro
    crossed = replace(
        later_visit(case.spec, case.workload).wire,
        encode_s=sum(row["encode_s"]) / messages,
        decode_s=sum(row["decode_s"]) / messages,
    )
    network = Network(bits_a_second("link", case.link) / 8)
    duplex = case.schedule == "gpipe" or case.spec != DENSE  # see plan/pipeline.py: torch's 1F1B over gloo
    return pipeline_step(stages, crossed, network, micro, schedule=case.schedule, duplex=duplex).step_s


@cache
def later_visit(spec: str, workload: str) -> Visited:
    """A micro-batch of samples that have crossed before, as the planner says it crosses."""
    size = WORKLOADS[workload]
    return rehearse_crossing(crossing(spec), (size.batch // size.micro_batches, WINDOW, WIDTH))[-1]


def line(case: Case, number: int, row: Row) -> None:
    """A figure, for the eye."""
    replicas = "" if case.replicas == 1 else f" x {case.replicas} {BETWEEN[case.between]}"
    print(
        f"{case.workload:8} {case.stages} stages{replicas:14} {case.schedule:5} {case.link:>7}"
        f"  round {number}  {row['step_s']:7.3f} s  sent {sum(row['sent']) / 1e6:7.2f} MB  {case.spec}",
        flush=True,
    )


if __name__ == "__main__":
    main()
