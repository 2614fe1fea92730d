"""Training without a barrier over slow links: one slow host, and bytes to reach the same loss.

    python -m benchmarks.straggler             8 hosts; writes benchmarks/straggler/results.json: 40 min
    python -m benchmarks.straggler --part asleep    one part; the file keeps what it has of the other
    python -m benchmarks.straggler --quick     3 hosts, a small model, a few steps; writes only with --out

Each rank is a process on a host of a lab (`laconic.tools.lab`), and trains a model of 11 million parameters.

Asleep: at 1 Gbit/s the last host sleeps 300 ms before half of its steps, chosen at random. The result is
the seconds until a rank has done its steps, as mean over ranks and for the slowest; with and without sleep.

To the same loss: at 100 Mbit/s dense DDP trains for some steps; the others train until
they reach its final held-out loss. The result is the bytes that a host's interface has sent until then,
including headers. Needs what `laconic lab` needs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.machine import machine
from laconic.tools.lab import Lab, Link, missing

RESULTS = Path(__file__).with_name("results.json")
ROOT = Path(__file__).parents[2]
DENSE = "dense()"
ASLEEP = (DENSE, "sgp()", "osgp(staleness=4)", "adpsgd(every=4)", "local_sgd(every=8)")
FEW = "scatter_reduce(minmax(bits=8))"  # 8 bits up and down, in the traffic of an all-reduce
TO_LOSS = (f"diloco(every=20, momentum=0.9, compressor={FEW})", f"local_sgd(every=20, compressor={FEW})")
FAST, SLOW = "1gbit", "100mbit"
SLEEP_S, SHARE = 0.3, 0.5
LR = 0.01
LIMIT_S = 1800  # for one case
TWICE, FEWER = 2, 20  # bars: times faster than dense beside a host asleep; times fewer bytes to its loss
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How much is measured. `patience`: how many times dense's steps the others may take."""

    hosts: int = 8
    width: int = 1048
    steps: int = 30
    repeats: int = 3
    dense_steps: int = 40
    patience: int = 6


QUICK = Size(hosts=3, width=128, steps=3, repeats=1, dense_steps=20, patience=2)


def main() -> None:
    """Measure, print a line a case, write the JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.straggler")
    parser.add_argument("--quick", action="store_true", help="a pass of minutes; writes only with --out")
    parser.add_argument("--part", action="append", choices=[*PARTS], help="may be repeated [default: all]")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    given = parser.parse_args()
    if reason := missing():
        print(f"skipped: {reason}")
        return
    size = QUICK if given.quick else Size()
    found = {part: PARTS[part](size) for part in given.part or PARTS}
    if out := given.out or (None if given.quick else RESULTS):
        about = {
            "machine": machine(),
            "hosts": size.hosts,
            "parameters": 10 * size.width * (size.width + 1),
            "repeats": size.repeats,
            "steps": size.steps,
            "links": {"asleep": FAST, "to_loss": SLOW},
            "sleep_s": SLEEP_S,
            "share": SHARE,
        }
        before = json.loads(out.read_text()) if given.part and out.exists() else {}
        out.write_text(json.dumps(before | about | found, indent=1) + "\n")


def all_asleep(size: Size) -> list[Row]:
    """A row for each strategy, with and without sleep: medians over repeats."""
    rows = []
    for spec in ASLEEP:
        for sleep_s in (0.0, SLEEP_S):
            case = {"spec": spec, "steps": size.steps, "sleep_s": sleep_s, "share": SHARE}
            told = [over_ranks(measure("asleep", FAST, size, case)) for _ in range(size.repeats)]
            row = case | {key: statistics.median(each[key] for each in told) for key in told[0]}
            rows.append(row)
            print(
                f"{spec:20} asleep {sleep_s:.1f} s: {row['mean_s']:6.1f} s, the slowest"
                f" {row['slowest_s']:6.1f} s, {row['sent_mb']:8.1f} MB a host",
                flush=True,
            )
    return rows


def over_ranks(told: list[dict[str, float]]) -> dict[str, float]:
    """Mean and slowest rank, and megabytes on average."""
    seconds = [each["steps_s"] for each in told]
    sent = statistics.mean(each["sent_mb"] for each in told)
    return {"mean_s": statistics.mean(seconds), "slowest_s": max(seconds), "sent_mb": sent}


def all_to_loss(size: Size) -> list[Row]:
    """A row for dense, and for each strategy that trains to dense's loss."""
    rows: list[Row] = []
    target = None
    for spec in (DENSE, *TO_LOSS):
        steps = size.dense_steps * (1 if target is None else size.patience)
        case = {"spec": spec, "steps": steps, "look_every": 10, "target": target}
        told = measure("to_loss", SLOW, size, case)
        row = {"spec": spec} | told[0] | {"sent_mb": statistics.mean(each["sent_mb"] for each in told)}
        target = row["losses"][-1] if target is None else target
        row["reached"] = row["losses"][-1] <= target
        rows.append(row)
        fewer = rows[0]["sent_mb"] / row["sent_mb"]
        print(
            f"{spec}: loss {row['losses'][-1]:.4f} in {row['steps']} steps and {row['seconds']:.0f} s,"
            f" {row['sent_mb']:.1f} MB a host, {fewer:.1f} times fewer"
            f"{'' if row['reached'] else '; did not get there'}",
            flush=True,
        )
    return rows


def measure(what: str, link: str, size: Size, case: Row) -> list[dict[str, Any]]:
    """What each rank tells of one case."""
    told = json.dumps(case | {"width": size.width, "lr": LR})
    command = [sys.executable, "-m", "benchmarks.straggler.rank", what, told]
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
    with Lab(size.hosts, Link(link)) as lab:
        return [json.loads(text) for text in lab.run(command, env=environment, timeout_s=LIMIT_S)]


PARTS = {"asleep": all_asleep, "to_loss": all_to_loss}

if __name__ == "__main__":
    main()
