"""How many steps a sparse method needs: the gap to dense training against steps times density.

    python -m benchmarks.sparse_steps            all runs; goes on where it stopped: 4 CPU hours
    python -m benchmarks.sparse_steps --only topk --seed 0    those of one method, with one seed
    python -m benchmarks.sparse_steps --density 0.01          those of one density, and dense training's
    python -m benchmarks.sparse_steps --quick    a few steps of each; nothing is kept

With density d, an entry of the gradient is sent about once in 1 / d steps, so a training has to be a multiple
of that before its loss can be compared with dense training's. Four workers train SMALL_NET of common/ on
CIFAR-10 (LACONIC_DATA names the folder) by SGD with momentum 0.9, at a rate that falls to 0 as a cosine,
whatever the length. Dense training of the same length and seed begins with the same weights and sees the same
batches.

Results by <method>-<density>-<steps>-<seed> are in benchmarks/sparse_steps/results.jsonl: test accuracy and
loss after the last step, the training loss by step, and the megabytes that a worker puts on the wire.
`make docs` writes docs/sparse_steps.md from them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common.machine import machine
from benchmarks.common.results import Results, Row
from benchmarks.common.small_net import SMALL_NET
from benchmarks.common.workers import train
from laconic.tools.report.ledger import slug
from laconic.tools.tasks.cifar10 import load

RUNS = Results(Path(__file__).with_name("results.jsonl"))
LR = 0.05
SEEDS = (0, 1, 2)
LENGTHS = {0.01: (250, 500, 1000, 2000, 4000), 0.001: (2500, 5000, 10000, 20000)}  # steps, by density
METHODS = {  # dgc has momentum before compression
    "topk": "error_fed(topk(density={density:g}), momentum='optimizer')",
    "dgc": "dgc(density={density:g}, warmup_steps={tenth})",
    "stc": "stc(density={density:g}, momentum='optimizer')",
}


@dataclass(frozen=True)
class Run:
    """One training. `density` 1: dense."""

    method: str
    density: float
    steps: int
    seed: int

    @property
    def spec(self) -> str:
        """What the workers exchange by."""
        if self.density == 1:
            return "dense()"
        return METHODS[self.method].format(density=self.density, tenth=self.steps // 10)

    @property
    def key(self) -> str:
        return f"{slug(f'{self.method}-{self.density:g}')}-{self.steps}-{self.seed}"

    @property
    def dense(self) -> Run:
        """The dense training to compare it with."""
        return Run("dense", 1, self.steps, self.seed)

    def read(self) -> Row | None:
        """Return the stored row, or None."""
        return RUNS.get(self.key)


def runs(densities: Iterable[float] = LENGTHS) -> Iterator[Run]:
    """Those of these densities: a seed's before the next seed's, dense before what is compared with it."""
    for seed in SEEDS:
        for density in densities:
            for steps in LENGTHS[density]:
                yield Run("dense", 1, steps, seed)
                yield from (Run(method, density, steps, seed) for method in METHODS)


def do(run: Run, data: dict[str, Tensor], *, lasting: bool = True) -> Row:
    """Train, and store the row if `lasting`."""
    made = train(SMALL_NET, run.spec, LR, run.steps, run.seed, data)
    row: Row = {"method": run.method, "density": run.density} | made | {"machine": machine()}
    if lasting:
        RUNS.put(run.key, row)
    print(
        f"{run.spec:42} {run.steps:6,} steps, seed {run.seed}: accuracy {100 * row['accuracy']:.2f} %,"
        f" loss {row['test_loss']:.4f}, {row['sent_mb']:.4g} MB a worker, {row['cpu_s']:.0f} CPU-s",
        flush=True,
    )
    return row


def main() -> None:
    """Train what is not done."""
    options = argparse.ArgumentParser(prog="benchmarks.sparse_steps")
    options.add_argument("--quick", action="store_true", help="a few steps of each; nothing is kept")
    options.add_argument("--only", choices=["dense", *METHODS])
    options.add_argument("--seed", type=int, choices=SEEDS)
    options.add_argument("--density", type=float, choices=LENGTHS)
    given = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    data = dict(load())
    if given.quick:
        for method in ("dense", *METHODS):
            if given.only in (None, method):
                do(Run(method, 1 if method == "dense" else 0.01, 20, 0), data, lasting=False)
        return
    for run in runs((given.density,) if given.density else LENGTHS):
        wanted = given.only in (None, run.method) and given.seed in (None, run.seed)
        if wanted and run.read() is None:
            do(run, data)


if __name__ == "__main__":
    main()
