"""Each method at a learning rate of its own: what it loses then, and what it would lose at dense training's.

    python -m benchmarks.own_rates            all runs; goes on where it stopped: 11 CPU hours
    python -m benchmarks.own_rates --only "sign()"    those of one method, after its baseline's
    python -m benchmarks.own_rates --quick    a few steps of each; nothing is kept

Four workers train SMALL_NET on CIFAR-10, DIGIT_NET on MNIST, and SMALL_GPT on Shakespeare (LACONIC_DATA names
the folder of all three). With the first seed, a method tries its family's usual rate, then twice and half of
what was best, until both neighbours of the best are worse in test loss; the other seeds train at that rate.
Dense training of each family looks for its rate in the same way. `auto()` is not among them: it chooses by
the link, and threads have none.

Results by <task>/<method>-<rate>-<seed> are in benchmarks/own_rates/results.jsonl; `make docs` writes
docs/own_rates.md from them.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.machine import machine
from benchmarks.common.rates import next_rate
from benchmarks.common.results import Results, Row
from benchmarks.common.small_net import (
    BY_MUON,
    BY_SIGNS,
    CNN,
    DIGIT_NET,
    RNN,
    SMALL_GPT,
    SMALL_NET,
    WITHOUT_MOMENTUM,
    load_windows,
)
from benchmarks.common.workers import Data, Problem, train
from laconic.core.errors import NonFiniteError
from laconic.tools.report.ledger import slug
from laconic.tools.tasks.cifar10 import load
from laconic.tools.tasks.mnist import load as load_digits

RUNS = Results(Path(__file__).with_name("results.jsonl"))
SEEDS = (0, 1, 2)
DIVERGED = "diverged"
FOUR_BITS = "scatter_reduce(logquant(levels=7))"
STREAMING = f"diloco(every=30, fragments=3, overlap=10, mix=0.5, compressor={FOUR_BITS})"


@dataclass(frozen=True)
class Family:
    """Methods that share an optimiser. `usual`: the rate that each tries first. `folder`: of its results.

    `why`: what it was tried for, and found.
    """

    name: str
    usual: float
    baseline: str
    others: tuple[str, ...]
    problem: Problem = SMALL_NET
    steps: int = 2000
    task: str = "cifar10"
    folder: str = "cifar10"
    why: str = ""

    @property
    def specs(self) -> tuple[str, ...]:
        """The baseline, then the others."""
        return self.baseline, *self.others


LOCAL_MOMENTUM = Family(
    "SGD with momentum before compression",
    0.025,
    "dense()",
    (
        "topk(density=0.01)",
        "error_fed(topk(density=0.01), ahead=0.0)",
        "error_fed(topk(density=0.01), momentum='optimizer')",
        "dgc(density=0.01, warmup_steps=400)",
        "stc(density=0.01)",
        "sketchml()",
        "deft(density=0.01)",
        "deft(density=0.05)",
        "deft(density=0.001)",
        "topk(density=0.001)",
        "dgc(density=0.001, warmup_steps=400)",
        "oktopk(density=0.01)",
        "micro(density=0.01)",
        "sign()",
    ),
    steps=4000,
    folder="cifar10-4000",
    why="Methods with error feedback apply momentum before compression; one row of `topk` leaves it to the"
    " optimiser.",
)
FAMILIES = (
    Family(
        "SGD with momentum",
        0.05,
        "dense()",
        (
            "cgx(bits=4)",
            "qsgd(levels=7)",
            "qsgd(levels=1, block=128)",
            "natural()",
            "terngrad()",
            "terngrad(scale='own')",
            "powersgd(rank=2)",
            "powersgd(rank=4)",
            "powersgd(rank=8)",
            "majority_vote()",
            "dgc(density=0.01, warmup_steps=200)",
            "ef21_sgdm()",
            "diloco(every=20)",
            "sparseloco(every=10, density=0.05)",
        ),
        why="`diloco` had an outer momentum of 0.9 here; with SGD its default is now 0.5 (docs/outer.md).",
    ),
    LOCAL_MOMENTUM,
    Family(
        "SGD with Nesterov momentum before compression, the CNN of `laconic train cifar10`",
        0.1,
        "dense()",
        ("topk(density=0.01)", "stc(density=0.01)", "deft(density=0.01)", "sign()"),
        CNN,
        1500,
        folder="cifar10-cnn",
        why="289,000 parameters, 32 images per worker and step, the recipe of the task.",
    ),
    Family(
        "SGD with Nesterov momentum before compression, the LSTM of `laconic train shakespeare`",
        3.0,
        "dense()",
        ("topk(density=0.01)", "stc(density=0.01)", "deft(density=0.01)", "sign()"),
        RNN,
        1500,
        "shakespeare",
        "shakespeare-lstm",
        "16 windows per worker and step, the recipe of the task.",
    ),
    Family(
        "SGD without momentum",
        0.25,
        "dense()",
        ("topk(density=0.01)", "stc(density=0.01)", "sign()", "ef21_sgdm()", "ef21_sgdm(topk(density=0.1))"),
        WITHOUT_MOMENTUM,
        folder="cifar10-without-momentum",
        why="Methods with error feedback fall short above because their residuals are applied late, and"
        " momentum repeats them. Without momentum `topk`, `stc` and `sign` do better than dense training"
        " without momentum. EF21 follows the gradients slowly when one entry in a hundred changes per step;"
        " with one in ten it keeps up.",
    ),
    Family(
        "LGC, MNIST",
        0.05,
        "dense()",
        (
            "cltk(density=0.01)",
            "lgc(density=0.01, dense_steps=40, train_steps=120)",
            "lgc(density=0.01, dense_steps=40, train_steps=240)",
            "lgc(density=0.01, dense_steps=40, train_steps=120, instance='per_node')",
            "lgc(density=0.01, dense_steps=40, train_steps=120, last_layer='topk')",
        ),
        DIGIT_NET,
        400,
        "mnist",
        "mnist",
        "`cltk` sends the same positions with exact values, in the first and last layer too. With codes for"
        " fewer steps, LGC loses less. A decoder for each rank is not better than one for the average code."
        " No momentum was added ahead of time yet: these rows are to be measured again.",
    ),
    Family(
        "LGC, MNIST",
        0.05,
        "dense()",
        ("cltk(density=0.01)", "lgc(density=0.01, dense_steps=40, train_steps=240)"),
        DIGIT_NET,
        1600,
        "mnist",
        "mnist-1600",
        "Longer training leaves less of the loss, which is largely the delay of entries that wait. No"
        " momentum was added ahead of time yet.",
    ),
    Family("Adam", 2e-3, "adam()", ("onebit_adam(warmup_steps=400)",)),
    Family(
        "AMSGrad",
        2e-3,
        "comp_ams(dense())",
        ("comp_ams(topk(density=0.01))", "comp_ams(sign())"),
    ),
    Family(
        "AdamW and bf16 autocast, a small transformer",
        2e-3,
        "dense()",
        (
            "bf16()",
            "cgx(bits=4)",
            "powersgd(rank=4)",
            "onebit_adam(warmup_steps=120)",
            "topk(density=0.01)",
            "demo()",
            "diloco(every=30)",
            STREAMING,
            "sparseloco(every=10, density=0.05)",
            "noloco(every=30)",
            "by_machine(diloco(every=30), ranks_per_node=2)",
        ),
        SMALL_GPT,
        600,
        "shakespeare",
        "shakespeare",
    ),
    Family(
        "AdamW and bf16 autocast, the same transformer",
        4e-3,
        "dense()",
        ("onebit_adam()", "sparse_adam()", "sparse_adam(warmup_steps=400)"),
        SMALL_GPT,
        2000,
        "shakespeare",
        "shakespeare-2000",
        "Bytes include the warm-up, in which gradients are not compressed. The automatic warm-up of"
        " `sparse_adam()` does not end in these steps: Adam's variance has not settled.",
    ),
    Family(
        "Muon with AdamW and bf16 autocast, the same transformer",
        4e-3,
        "dense()",
        ("cgx(bits=4)", "dion2()", "dion2(fraction=1.0)"),
        BY_MUON,
        600,
        "shakespeare",
        "shakespeare-by-muon",
        "Muon, without Nesterov's correction, trains the matrices inside layers, AdamW the rest, at the same"
        " rate. `dion2(fraction=1.0)` is Muon whose momentum, not the gradient, is exchanged.",
    ),
    Family(
        "Steps by sign and bf16 autocast, the same transformer",
        5e-4,
        "dense()",
        ("demo()",),
        BY_SIGNS,
        600,
        "shakespeare",
        "shakespeare-by-signs",
        "DeMo falls short above because it was published with sign steps of the decoded momentum, not with"
        " Adam's. Compared with dense training by sign steps it loses nothing.",
    ),
)


@dataclass(frozen=True)
class Run:
    """One training."""

    family: Family
    spec: str
    rate: float
    seed: int

    @property
    def key(self) -> str:
        return f"{self.family.folder}/{slug(self.spec)}-{self.rate:g}-{self.seed}"

    def read(self) -> Row | None:
        """Return the stored row, or None."""
        return RUNS.get(self.key)


def loss_of(row: Row) -> float:
    """What a better rate has less of."""
    loss: float = math.inf if row.get(DIVERGED) else row["test_loss"]
    return loss


def tried(family: Family, spec: str) -> dict[float, Row]:
    """The runs of the first seed that are done, by rate, in the order of the search."""
    found: dict[float, Row] = {}
    while (rate := next_rate(losses_of(found), family.usual)) is not None:
        row = Run(family, spec, rate, SEEDS[0]).read()
        if row is None:
            break
        found[rate] = row
    return found


def losses_of(rows: dict[float, Row]) -> dict[float, float]:
    """The loss of each rate."""
    return {rate: loss_of(row) for rate, row in rows.items()}


def own_rate(family: Family, spec: str) -> float | None:
    """The method's own rate; None while the search is going on."""
    losses = losses_of(tried(family, spec))
    if next_rate(losses, family.usual) is not None:
        return None
    return min(losses, key=lambda rate: losses[rate])


def runs(spec: str, family: Family) -> dict[int, Row]:
    """The runs at the method's own rate that did not diverge, by seed."""
    rate = own_rate(family, spec)
    found = {} if rate is None else {seed: Run(family, spec, rate, seed).read() for seed in SEEDS}
    return {seed: row for seed, row in found.items() if row is not None and DIVERGED not in row}


def due(only: str | None = None) -> Iterator[Run]:
    """What is not done: searches first, then the other seeds. Each has to be kept before the next is asked.

    `only`: of this method and its baseline.
    """
    wanted = [
        (family, spec)
        for family in FAMILIES
        for spec in family.specs
        if only is None or spec == only or (spec == family.baseline and only in family.specs)
    ]
    for family, spec in wanted:
        while (rate := next_rate(losses_of(tried(family, spec)), family.usual)) is not None:
            yield Run(family, spec, rate, SEEDS[0])
    for seed in SEEDS[1:]:
        for family, spec in wanted:
            own = own_rate(family, spec)
            assert own is not None
            if (run := Run(family, spec, own, seed)).read() is None:
                yield run


def do(run: Run, data: Data, steps: int | None = None) -> Row:
    """What comes of a run; one that diverges is a result too. `steps`: other than planned, for a trial."""
    steps = steps or run.family.steps
    try:
        row = train(run.family.problem, run.spec, run.rate, steps, run.seed, data)
    except NonFiniteError as error:
        row = {"spec": run.spec, "lr": run.rate, "seed": run.seed, "steps": steps, DIVERGED: str(error)}
    told = (
        f"accuracy {100 * row['accuracy']:.2f} %, loss {row['test_loss']:.4f}"
        if "accuracy" in row
        else DIVERGED
    )
    print(f"{run.spec:40} rate {run.rate:<8g} seed {run.seed}: {told}", flush=True)
    return row


def main() -> None:
    """Train what is not done."""
    specs = list(dict.fromkeys(spec for family in FAMILIES for spec in family.specs))
    options = argparse.ArgumentParser(prog="benchmarks.own_rates")
    options.add_argument("--quick", action="store_true", help="a few steps of each; nothing is kept")
    options.add_argument("--only", choices=specs, metavar="SPEC", help="one of: " + ", ".join(specs))
    given = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    data = {"cifar10": dict(load()), "mnist": dict(load_digits()), "shakespeare": load_windows()}
    if given.quick:
        for family in FAMILIES:
            for spec in family.specs:
                if given.only in (None, spec):
                    do(Run(family, spec, family.usual, SEEDS[0]), data[family.task], steps=20)
        return
    for run in due(given.only):
        RUNS.put(run.key, do(run, data[run.family.task]) | {"machine": machine()})


if __name__ == "__main__":
    main()
