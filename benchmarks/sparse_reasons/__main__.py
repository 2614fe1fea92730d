"""Why top-k with error feedback stays below dense training, and DGC does not: momentum, rate or warm-up.

    python -m benchmarks.sparse_reasons            all runs; goes on where it stopped: 40 CPU minutes
    python -m benchmarks.sparse_reasons --quick    a few steps of each; nothing is kept

As benchmarks.sparse_steps, at its density DENSITY and STEPS steps, with one thing changed at a time. Without
momentum the rate is ten times as high, which moves as far in the long run as momentum 0.9 does.

Results by <try>-<seed> are in benchmarks/sparse_reasons/results.jsonl; they fill a part of
docs/sparse_steps.md.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from benchmarks.common.machine import machine
from benchmarks.common.results import Results, Row
from benchmarks.common.small_net import SMALL_NET
from benchmarks.common.workers import train
from benchmarks.sparse_steps.__main__ import LR, SEEDS
from laconic.exchange.method import Method
from laconic.strategies.strategy import Strategy
from laconic.tools.report.ledger import slug
from laconic.tools.tasks.cifar10 import load

RUNS = Results(Path(__file__).with_name("results.jsonl"))
DENSITY, STEPS = 0.01, 2000


def without_momentum(model: nn.Module, lr: float, by: Method | Strategy) -> Optimizer:
    """Plain SGD."""
    return SGD(model.parameters(), lr=lr)


@dataclass(frozen=True)
class Try:
    """What is changed. `rate`: times that of benchmarks.sparse_steps; `momentum`: 0.9, or none."""

    spec: str
    rate: float = 1.0
    momentum: bool = True


TRIES = {
    "dgc, no warm-up": Try(f"dgc(density={DENSITY})"),
    "topk, a quarter of the rate": Try(f"topk(density={DENSITY})", rate=0.25),
    "topk, no momentum": Try(f"topk(density={DENSITY})", rate=10, momentum=False),
    "stc, no momentum": Try(f"stc(density={DENSITY})", rate=10, momentum=False),
    "dense, no momentum": Try("dense()", rate=10, momentum=False),
}


@dataclass(frozen=True)
class Run:
    """One training."""

    name: str
    seed: int

    @property
    def key(self) -> str:
        return f"{slug(self.name)}-{self.seed}"

    def read(self) -> Row | None:
        """Return the stored row, or None."""
        return RUNS.get(self.key)


def runs() -> Iterator[Run]:
    """All of them: those of a seed before the next seed."""
    yield from (Run(name, seed) for seed in SEEDS for name in TRIES)


def do(run: Run, data: dict[str, Tensor], steps: int = STEPS, *, lasting: bool = True) -> Row:
    """Train, and store the row if `lasting`."""
    asked = TRIES[run.name]
    problem = SMALL_NET if asked.momentum else replace(SMALL_NET, optimizer=without_momentum)
    row: Row = {"name": run.name, "momentum": 0.9 if asked.momentum else 0.0}
    row |= train(problem, asked.spec, asked.rate * LR, steps, run.seed, data) | {"machine": machine()}
    if lasting:
        RUNS.put(run.key, row)
    print(f"{run.name:30} seed {run.seed}: accuracy {100 * row['accuracy']:.2f} %", flush=True)
    return row


def main() -> None:
    """Train what is not done."""
    options = argparse.ArgumentParser(prog="benchmarks.sparse_reasons")
    options.add_argument("--quick", action="store_true", help="a few steps of each; nothing is kept")
    given = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    data = dict(load())
    for run in runs():
        if given.quick and run.seed == SEEDS[0]:
            do(run, data, steps=20, lasting=False)
        elif not given.quick and run.read() is None:
            do(run, data)


if __name__ == "__main__":
    main()
