"""One slow worker under each deployment of a Replicator: seconds to so many gradients, and their staleness.

    python -m benchmarks.replicator            writes benchmarks/replicator/results.jsonl: about 10 min
    python -m benchmarks.replicator --quick    two small runs; writes only with --out

4 workers on this machine, beside a server where the deployment has one, all over gloo's loopback. The last
worker sleeps 300 ms before half of its steps, chosen at random; in a second run of each it does not. A run
ends when so many gradients have been applied, each of one worker's batch: `sync` applies 4 at every update,
so that both sides have seen equally many examples. All workers begin together.

A stored run is not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common.machine import machine
from benchmarks.common.results import Results, Row

RUNS = Results(Path(__file__).with_name("results.jsonl"))
ROOT = Path(__file__).parents[2]
WORKERS = 4
SYNC, ASYNC, GROUPS = "sync", "async(staleness=64)", "groups(size=2, staleness=64)"
DEPLOYMENTS = (SYNC, ASYNC, GROUPS)
SLEEP_S, SHARE = 0.3, 0.5
TWICE = 2  # bar: times faster than sync beside a sleeping worker
LIMIT_S = 300  # for one run


@dataclass(frozen=True)
class Case:
    """One run. `gradients`: how many are applied, each of one worker's batch."""

    spec: str
    sleep_s: float
    repeat: int = 0
    gradients: int = 480
    width: int = 256
    share: float = SHARE

    @property
    def key(self) -> str:
        return f"{self.spec.partition('(')[0]}-{'asleep' if self.sleep_s else 'awake'}-{self.repeat}"


def cases(repeats: int = 3) -> Iterator[Case]:
    """All runs, every deployment once before any twice."""
    for repeat in range(repeats):
        for spec in DEPLOYMENTS:
            for sleep_s in (0.0, SLEEP_S):
                yield Case(spec, sleep_s, repeat)


def measured(case: Case) -> Row:
    """Run the case's ranks, and add up what they tell."""
    servers = 0 if case.spec == SYNC else 1
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(WORKERS + servers), "-m", "benchmarks.replicator.rank"),
            *(folder, json.dumps(asdict(case))),
        ]
        subprocess.run(command, check=True, timeout=LIMIT_S, cwd=ROOT)
        told = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    staleness = Counter[str]()
    for each in told:
        staleness.update(each["staleness"])
    sharing = told[0]["sharing"]  # replicas that tell of the same updates
    return {
        "case": asdict(case),
        "machine": machine(),
        "seconds": min(each["done"] for each in told)
        - min(each["began"] for each in told),  # one clock for all
        "steps": [each["steps"] for each in told],
        "refused": sum(each["refused"] for each in told) // sharing,
        "staleness": {key: staleness[key] // sharing for key in sorted(staleness, key=int)},
        "loss": min(told, key=lambda each: each["done"])["loss"],
    }


def main() -> None:
    """Do the runs that are missing, and print a line each."""
    parser = argparse.ArgumentParser(prog="benchmarks.replicator")
    parser.add_argument("--quick", action="store_true", help="two small runs; writes only with --out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="the file of the results")
    given = parser.parse_args()
    quick = [Case(spec, SLEEP_S, gradients=24, width=32) for spec in (SYNC, ASYNC)]
    runs = Results(given.out) if given.out else None if given.quick else RUNS
    for case in quick if given.quick else cases(given.repeats):
        if runs is not None and case.key in runs:
            continue
        row = measured(case)
        print(
            f"{case.spec:28} asleep {case.sleep_s:.1f} s: {row['seconds']:6.2f} s, loss {row['loss']:.4f},"
            f" steps {row['steps']}, refused {row['refused']}, staleness {row['staleness']}",
            flush=True,
        )
        if runs is not None:
            runs.put(case.key, row)


if __name__ == "__main__":
    main()
