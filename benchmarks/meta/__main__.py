"""Meta-learning among agents: loss after few steps on new tasks, bytes, and energy by the model of the room.

    python -m benchmarks.meta                      all of it; goes on where it stopped
    python -m benchmarks.meta --task sinusoids --seed 0
    python -m benchmarks.meta --budget-minutes 30  starts no training that would end later
    python -m benchmarks.meta --quick              two rounds of each, to see that it runs; keeps nothing

A training in benchmarks/meta/results.jsonl is not repeated; everything is trained with one seed
before the next seed. `make docs` writes docs/meta_learning.md from them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.machine import machine
from benchmarks.common.results import Results
from laconic.federated.meta import (
    PSGA,
    Averaging,
    Energy,
    ImplicitGradient,
    Learner,
    Local,
    MetaGradient,
    Mlp,
    RotatedDigits,
    Sinusoids,
    Trained,
    few_step,
)
from laconic.federated.meta.learner import cross_entropy
from laconic.federated.meta.trained import Work
from laconic.tools.report.summary import plain

RUNS = Results(Path(__file__).with_name("results.jsonl"))
SEEDS, AGENTS, ROUNDS = 3, 50, 50
OWN_MODELS: dict[Any, tuple[Tensor, int]] = {}
Method = PSGA | Averaging | MetaGradient | ImplicitGradient


@dataclass(frozen=True)
class Problem:
    """A network, how the tasks to learn and the new ones are drawn, and the steps on a new one."""

    learner: Learner
    agents: Any
    new: Any
    shots: int
    queries: int
    lr: float


PROBLEMS = {
    "sinusoids": Problem(
        Learner(Mlp((1, 40, 40, 1))),
        agents=partial(Sinusoids, AGENTS),
        new=partial(Sinusoids, 600),
        shots=10,
        queries=100,
        lr=0.01,
    ),
    "digits": Problem(
        Learner(Mlp((64, 64, 64, 5)), cross_entropy),
        agents=partial(RotatedDigits, AGENTS),
        new=partial(RotatedDigits, 200, digits=(7, 8, 9)),
        shots=5,
        queries=15,
        lr=0.1,
    ),
}
OWN = Local(steps=1000, lr=0.01, momentum=0.9)  # local models on sinusoids
FEW, MANY = replace(OWN, steps=100), replace(OWN, steps=3000)
CLIMB = PSGA(rounds=ROUNDS, local=OWN)
PLAIN = Local(steps=20, lr=0.01, momentum=0.0)  # local steps of a round
LONG = 1000
IMPLICIT = ImplicitGradient(rounds=ROUNDS, outer_lr=1e-2)
SINUSOIDS: dict[str, Method] = {
    "mean of local models": Averaging(rounds=1, local=OWN),
    "P-SGA": CLIMB,
    "FedAvg": Averaging(rounds=ROUNDS, local=PLAIN),
    "Reptile": Averaging(rounds=ROUNDS, step=0.5, local=PLAIN),
    "first-order MAML": MetaGradient(rounds=ROUNDS, order=1, outer_lr=1e-2),
    "MAML": MetaGradient(rounds=ROUNDS, outer_lr=1e-2),
    "MAML, 16 inner steps": MetaGradient(rounds=ROUNDS, inner_steps=16, outer_lr=1e-2),
    "iMAML": IMPLICIT,
    "P-SGA, qsgd": replace(CLIMB, up="qsgd(levels=7)", down="qsgd(levels=7)"),
    "P-SGA, topk": replace(CLIMB, up="topk(density=0.1)", down="topk(density=0.1)"),
    "P-SGA, K=10": replace(CLIMB, rounds=10),
    "P-SGA, K=200": replace(CLIMB, rounds=200),
    "P-SGA, r=0.1": replace(CLIMB, radius=0.1),
    "P-SGA, r=3": replace(CLIMB, radius=3.0),
    "P-SGA, eta=0.001": replace(CLIMB, eta=0.001),
    "P-SGA, eta=0.1": replace(CLIMB, eta=0.1),
    "P-SGA, K=10, eta=0.1": replace(CLIMB, rounds=10, eta=0.1),
    "P-SGA, K=200, eta=0.001": replace(CLIMB, rounds=200, eta=0.001),
    "P-SGA, clip=10": replace(CLIMB, clip=10.0),
    "P-SGA, power=0.3": replace(CLIMB, power=0.3),
    "P-SGA, power=3": replace(CLIMB, power=3.0),
    "mean of local models, steps=100": Averaging(rounds=1, local=FEW),
    "P-SGA, steps=100": replace(CLIMB, local=FEW),
    "mean of local models, steps=3000": Averaging(rounds=1, local=MANY),
    "P-SGA, steps=3000": replace(CLIMB, local=MANY),
    "Reptile, long": Averaging(rounds=LONG // 5, step=0.5, local=PLAIN),
    "MAML, long": MetaGradient(rounds=LONG, outer_lr=3e-3),
    "MAML, new agents every round": MetaGradient(rounds=8 * LONG),
    "joint training, new agents every round": MetaGradient(rounds=8 * LONG, order=1, inner_steps=0),
}
TURNED = Local(steps=200, lr=0.05, momentum=0.9)
TURNED_PLAIN = Local(steps=10, lr=0.05, momentum=0.0)
STEPS_OF_FIVE = MetaGradient(rounds=ROUNDS, inner_lr=0.1, outer_lr=1e-2, shots=5, queries=5)
IMPLICIT_OF_FIVE = ImplicitGradient(rounds=ROUNDS, inner_lr=0.1, shots=5, queries=5)
DIGITS: dict[str, Method] = {
    "mean of local models": Averaging(rounds=1, local=TURNED),
    "P-SGA": PSGA(rounds=ROUNDS, local=TURNED),
    "P-SGA, qsgd": PSGA(rounds=ROUNDS, local=TURNED, up="qsgd(levels=7)", down="qsgd(levels=7)"),
    "FedAvg": Averaging(rounds=ROUNDS, local=TURNED_PLAIN),
    "Reptile": Averaging(rounds=ROUNDS, step=0.5, local=TURNED_PLAIN),
    "first-order MAML": replace(STEPS_OF_FIVE, order=1),
    "MAML": STEPS_OF_FIVE,
    "iMAML": IMPLICIT_OF_FIVE,
    "MAML, long": replace(STEPS_OF_FIVE, rounds=500, outer_lr=1e-3),
}
METHODS = {"sinusoids": SINUSOIDS, "digits": DIGITS}


@dataclass(frozen=True)
class Trial:
    """One method on one problem with one seed."""

    task: str
    name: str
    seed: int

    @property
    def key(self) -> str:
        short = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in self.name.lower())
        return f"{self.task}/{short.replace('__', '_')}-{self.seed}"

    @property
    def method(self) -> Method:
        """What is trained."""
        return METHODS[self.task][self.name]


def trials(tasks: list[str], seeds: list[int]) -> Iterator[Trial]:
    """Every method with one seed before the next seed."""
    for seed in seeds:
        for task in tasks:
            for name in METHODS[task]:
                yield Trial(task, name, seed)


def measured(trial: Trial, method: Method) -> dict[str, Any]:
    """Train, test on new tasks, and give what is to be kept."""
    problem, seed = PROBLEMS[trial.task], trial.seed
    began = time.monotonic()
    agents = problem.agents(seed=seed)
    if trial.name.endswith("new agents every round"):
        agents = Sinusoids(25, seed=seed, fresh=True)
    first = problem.learner.network.first(seed)
    trained = train(problem.learner, agents, first, method, seed)
    found = few_step(
        problem.learner,
        problem.new(seed=1000 + seed),
        trained.weights,
        shots=problem.shots,
        queries=problem.queries,
        lr=problem.lr,
    )
    energy = Energy()
    return {
        "task": trial.task,
        "name": trial.name,
        "method": repr(method),
        "seed": seed,
        "agents": agents.count,
        "rounds": trained.rounds,
        "steps": list(found.steps),
        "loss": list(found.loss),
        "accuracy": None if found.accuracy is None else list(found.accuracy),
        "up": trained.up_nbytes,
        "down": trained.down_nbytes,
        "flops": trained.flops,
        "joules_computing": energy.computing(trained),
        "joules_sending": energy.sending(trained),
        "apart": apart(trained),
        "minutes": round((time.monotonic() - began) / 60, 2),
        "machine": machine(),
    }


def train(learner: Learner, agents: Any, first: Tensor, method: Method, seed: int) -> Trained:
    """As `method.train` does; local models that several variants of P-SGA begin with are made once."""
    if not isinstance(method, PSGA):
        return method.train(learner, agents, first, seed)
    key = (agents, method.local)
    if key not in OWN_MODELS:
        work = Work()
        own = method.local.train(learner, agents, first.repeat(agents.count, 1), work)
        OWN_MODELS[key] = (own, work.flops)
    own, flops = OWN_MODELS[key]
    return method.climb(learner, agents, first, own, Work(flops), seed)


def apart(trained: Trained) -> float:
    """The farthest agent from the meta-model at the end."""
    return float((trained.agents - trained.weights).norm(dim=1).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--task", choices=sorted(PROBLEMS))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--only", help="methods whose name contains this")
    parser.add_argument("--but", help="no methods whose name contains this")
    parser.add_argument("--budget-minutes", type=float, default=float("inf"))
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tasks = [asked.task] if asked.task else list(PROBLEMS)
    seeds = [0] if asked.quick else [asked.seed] if asked.seed is not None else [*range(SEEDS)]
    end, longest = time.monotonic() + 60 * asked.budget_minutes, 0.0
    for trial in trials(tasks, seeds):
        if trial.key in RUNS and not asked.quick:
            continue
        if (asked.only or "") not in trial.name or (asked.but is not None and asked.but in trial.name):
            continue
        start = time.monotonic()
        if start + longest > end:
            break
        found = measured(trial, replace(trial.method, rounds=2) if asked.quick else trial.method)
        longest = max(longest, time.monotonic() - start)
        shown = ", ".join(f"{loss:.2f}" for loss in found["loss"])
        right = "" if found["accuracy"] is None else f", {100 * found['accuracy'][-1]:.1f} %"
        print(
            f"{trial.task}, seed {trial.seed}: {trial.name}: {shown}{right},"
            f" {(found['up'] + found['down']) / 1e6:.2f} MB,"
            f" {found['joules_computing'] + found['joules_sending']:.1f} J,"
            f" {time.monotonic() - start:.0f} s",
            flush=True,
        )
        if not asked.quick:
            RUNS.put(trial.key, plain(found))


if __name__ == "__main__":
    main()
