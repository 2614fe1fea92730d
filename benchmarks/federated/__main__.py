"""Accuracy against bytes both ways, where clients differ much: 100 clients of 2 classes each, 10 a round.

    python -m benchmarks.federated                      all of it; goes on where it stopped
    python -m benchmarks.federated --task mnist --seed 0
    python -m benchmarks.federated --budget-minutes 30  starts no training that would end later
    python -m benchmarks.federated --task cifar10 --longer --seed 0    1,000 rounds of two schemes
    python -m benchmarks.federated --quick              a few rounds of each; keeps nothing

Needs LACONIC_DATA. All methods do equal local steps from the same first model, which clients make themselves.
A training in benchmarks/federated/results.jsonl is not repeated; every method is trained with one
seed before the next seed. `make docs` writes docs/federated_accuracy.md from them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.machine import machine
from benchmarks.common.results import Results
from laconic.tools.report.ledger import slug
from laconic.tools.tasks import find
from laconic.tools.tasks.federation import Federation, federate
from laconic.tools.tasks.task import Tensors

RUNS = Results(Path(__file__).with_name("results.jsonl"))
SEEDS, QUICK = 3, 2
SCHEMES = (
    "fedavg()",
    "stc(density=0.0025, down=0.0025)",
    "stc(density=0.01, down=0.01)",
    "signsgd()",
    "stc(density=0.04, down=0.04)",
    "dgc(density=0.01)",
    "updates(dhqc(density=0.01), down=dhqc(density=0.01), sampling=falling(0.2))",
    "zerofl(sparsity=0.9, mask_ratio=0.1)",
)
RATES = {"mnist": 0.05, "cifar10": 0.05}  # of plain SGD, without momentum
MODELS = {"mnist": None, "cifar10": "cnn"}  # small ones: devices train them
ROUNDS, LOCAL_STEPS, EVAL_EVERY = 200, 5, 10
LONGER, LONGER_SCHEMES = 1000, ("fedavg()", "stc(density=0.04, down=0.04)")  # 40 / density rounds
PLAN = Federation(
    task="mnist",
    model=None,
    spec="fedavg()",
    by="classes_per_client(classes=2)",
    clients=100,
    per_round=10,
    rounds=ROUNDS,
    local_steps=LOCAL_STEPS,
    batch=20,
    lr=0.05,
    momentum=0.0,
    seed=0,
    eval_every=EVAL_EVERY,
)


def group_of(task: str, rounds: int) -> str:
    """Return the first part of the keys of trainings of so many rounds."""
    return task if rounds == ROUNDS else f"{task}-{rounds}"


@dataclass(frozen=True)
class Trial:
    """One scheme on one task with one seed."""

    task: str
    spec: str
    seed: int
    rounds: int = ROUNDS

    @property
    def key(self) -> str:
        return f"{group_of(self.task, self.rounds)}/{slug(self.spec)}-{self.seed}"

    @property
    def plan(self) -> Federation:
        """Its settings."""
        settings = {"model": MODELS[self.task], "lr": RATES[self.task]}
        every = EVAL_EVERY * self.rounds // ROUNDS
        named = {"task": self.task, "spec": self.spec, "seed": self.seed}
        return replace(PLAN, **named, rounds=self.rounds, eval_every=every, **settings)


def trials(tasks: list[str], seeds: list[int], longer: bool = False) -> Iterator[Trial]:
    """Every scheme with one seed before the next seed."""
    schemes, rounds = (LONGER_SCHEMES, LONGER) if longer else (SCHEMES, ROUNDS)
    for seed in seeds:
        for task in tasks:
            for spec in schemes:
                yield Trial(task, spec, seed, rounds)


def measured(plan: Federation, tensors: Tensors) -> dict[str, Any]:
    """Train, and give what is to be kept: bytes of all clients together, by round, and tests."""
    began = time.monotonic()
    told = list(federate(plan, tensors))
    tests = [event for event in told if "accuracy" in event]
    up, down = (
        [sum(event[way] for event in told[: test["round"]]) for test in tests] for way in ("up", "down")
    )
    return asdict(plan) | {
        "round": [test["round"] for test in tests],
        "accuracy": [test["accuracy"] for test in tests],
        "test_loss": [test["test_loss"] for test in tests],
        "up": up,
        "down": down,
        "participants": sum(len(event["chosen"]) for event in told),
        "failed": sum(len(event["failed"]) for event in told),
        "minutes": round((time.monotonic() - began) / 60, 2),
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--task", choices=sorted(RATES))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--budget-minutes", type=float, default=float("inf"))
    parser.add_argument("--longer", action="store_true")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tasks = [asked.task] if asked.task else list(RATES)
    seeds = [0] if asked.quick else [asked.seed] if asked.seed is not None else [*range(SEEDS)]
    data = {task: find(task).load(None) for task in tasks}
    end, longest = time.monotonic() + 60 * asked.budget_minutes, 0.0
    for trial in trials(tasks, seeds, asked.longer):
        if trial.key in RUNS and not asked.quick:
            continue
        start = time.monotonic()
        if start + longest > end:
            break
        plan = replace(trial.plan, rounds=QUICK, eval_every=1) if asked.quick else trial.plan
        found = measured(plan, data[trial.task])
        longest = max(longest, time.monotonic() - start)
        print(
            f"{trial.task}, seed {trial.seed}: {trial.spec}: accuracy {100 * found['accuracy'][-1]:.2f} %,"
            f" {found['up'][-1] / 1e6:.2f} MB up, {found['down'][-1] / 1e6:.2f} MB down,"
            f" {time.monotonic() - start:.0f} s",
            flush=True,
        )
        if not asked.quick:
            RUNS.put(trial.key, found)


if __name__ == "__main__":
    main()
