"""Cost of undoing skipped steps: milliseconds of an exchange per million entries, before and after.

    python -m benchmarks.skipped_steps --before TREE

TREE: a worktree of the commit before memories were restored after a skipped step, with an environment of its
own in `.venv`. The two trees alternate. Two ranks of one process share a core, so half of their time is the
work of one, without a network; forward and backward passes, which do not change, are left out.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.ddp.handle import Handle
from laconic.exchange.method import lift

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.json")
SPECS = ("dgc(density=0.001)", "topk(density=0.01)")
MILLIONS = (6, 25)
RANKS = 2
WARM, STEPS = 2, 5


def exchange_ms(spec: str, millions: int) -> float:
    """Median milliseconds of one rank's work in the exchange of a step, per million entries."""

    def rank(comm: Loopback) -> list[float]:
        names: dict[Tensor, str] = {
            nn.Parameter(torch.zeros(1000, 1000, dtype=torch.float32)): f"{i}.weight" for i in range(millions)
        }
        optimizer = torch.optim.SGD(list(names), lr=0.1, momentum=0.9)
        exchange: Any = Handle(lift(spec), names, optimizer, Metered(comm)).exchange
        late = {"wait": True} if "wait" in inspect.signature(exchange.mean_).parameters else {}
        rng = torch.Generator().manual_seed(comm.rank)
        gradient = torch.randn(exchange.layout.numel, generator=rng, dtype=torch.float32)
        bucket, seconds = torch.empty_like(gradient), []
        for _ in range(WARM + STEPS):
            bucket.copy_(gradient)
            comm.all_reduce(torch.zeros(1, dtype=torch.float32))
            start = time.perf_counter()
            exchange.begin()
            exchange.mean_(bucket, exchange.layout, **late)
            exchange.end()
            comm.all_reduce(torch.zeros(1, dtype=torch.float32))
            seconds.append(time.perf_counter() - start)
        return seconds[WARM:]

    return 1e3 * statistics.median(Loopback.run(RANKS, rank)[0]) / RANKS / millions


def measured_in(tree: Path) -> dict[str, float]:
    """All figures of one tree, in a process of its own."""
    command = [tree / ".venv" / "bin" / "python", "-P", __file__, "--child"]  # the tree's own package
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    text = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, float] = json.loads(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="worktree of the earlier commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        torch.set_num_threads(1)
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        print(json.dumps({f"{spec}, {n} M": exchange_ms(spec, n) for n in MILLIONS for spec in SPECS}))
        return
    from benchmarks.common.machine import machine

    trees = {"before": options.before.absolute(), "after": ROOT}
    head = ["git", "rev-parse", "--short=10", "HEAD"]
    before = subprocess.run(head, cwd=options.before, capture_output=True, text=True, check=True).stdout
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(options.rounds):
        rounds.append({name: measured_in(tree) for name, tree in trees.items()})
        print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr, flush=True)
    figures = []
    for case in rounds[0]["after"]:
        ms = {name: [each[name][case] for each in rounds] for name in trees}
        medians = {name: statistics.median(values) for name, values in ms.items()}
        figures.append(
            {
                "case": case,
                "ms_per_million": {name: round(each, 4) for name, each in medians.items()},
                "rounds": {name: [round(each, 4) for each in values] for name, values in ms.items()},
                "ratio": round(medians["after"] / medians["before"], 4),
            }
        )
    command = f"python -m benchmarks.skipped_steps --before TREE --rounds {options.rounds}"
    result = {"machine": machine(), "command": command, "before": before.strip(), "figures": figures}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for each in figures:
        print(each["case"], each["ms_per_million"], each["ratio"])


if __name__ == "__main__":
    main()
