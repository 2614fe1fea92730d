"""Why P-SGA ends where it does on sinusoids: gradients where agents stand, and the same walk without ascent.

    python -m benchmarks.meta_reasons            three seeds; goes on where it stopped
    python -m benchmarks.meta_reasons --quick    a few steps, to see that it runs; keeps nothing

A seed in benchmarks/meta/results.jsonl is not measured again. `make docs` writes a part of
docs/meta_learning.md from the files.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from benchmarks.common.machine import machine
from benchmarks.meta.__main__ import AGENTS, CLIMB, PROBLEMS, RUNS, SEEDS
from laconic.federated.meta import PSGA, Learner, Sinusoids, few_step
from laconic.federated.meta.learner import clipped
from laconic.federated.meta.psga import projected
from laconic.federated.meta.trained import Work
from laconic.tools.report.summary import plain

GROUP = "reasons"  # of the keys in RUNS
DRAWS, LARGE = 20, 1000  # batches of ascent's size to average over; examples of a batch almost without noise
LATER = 1_000_000  # a step whose batches no training has drawn
SIGNS = {"ascent": 1.0, "projection alone": 0.0, "descent": -1.0}


def measured(seed: int, plan: PSGA = CLIMB) -> dict[str, Any]:
    """One seed: what the gradient is at the own models and at their mean, and where three walks end."""
    problem = PROBLEMS["sinusoids"]
    learner, agents = problem.learner, Sinusoids(AGENTS, seed=seed)
    first = learner.network.first(seed)
    own = plan.local.train(learner, agents, first.repeat(AGENTS, 1), Work())
    mean = own.mean(dim=0)
    walks = {}
    for name, sign in SIGNS.items():
        end = walk(learner, agents, own, plan, sign * plan.eta)
        found = few_step(learner, problem.new(seed=1000 + seed), end, shots=problem.shots, lr=problem.lr)
        walks[name] = {
            "loss": list(found.loss),
            "agents": on_agents(learner, agents, end.repeat(AGENTS, 1)),
            "moved": float((end - mean).norm()),
        }
    return {
        "seed": seed,
        "method": repr(plan),
        "steps": list(found.steps),
        "own_loss": on_agents(learner, agents, own),
        "mean_loss": on_agents(learner, agents, mean.repeat(AGENTS, 1)),
        "far": average((own - mean).norm(dim=1)),
        **gradients(learner, agents, own, mean, first, plan.batch),
        "walks": walks,
        "machine": machine(),
    }


def walk(learner: Learner, agents: Sinusoids, own: Tensor, plan: PSGA, eta: float) -> Tensor:
    """Where P-SGA's walk from these models (a, n) ends with this step, which may be 0 or negative.

    With `plan.eta` it ends where `plan.climb` ends with dense messages.
    """
    at, unit, centre = own, 0.0, own[0]
    for k in range(plan.rounds):
        uphill = learner.gradients(at, *agents.batch(plan.local.steps + k, plan.batch))
        at = at + eta * clipped(uphill, plan.clip)
        centre = at.mean(dim=0)
        if k == 0:
            unit = float((at - centre).norm(dim=1).max())
        at = projected(at, centre, float(torch.tensor(unit * plan.share(k))))
    return centre


def gradients(
    learner: Learner, agents: Sinusoids, own: Tensor, mean: Tensor, first: Tensor, batch: int
) -> dict[str, float]:
    """Norms of gradients, and their cosine to the way back; means over agents and `DRAWS` batches."""
    together = mean.repeat(AGENTS, 1)
    found: dict[str, list[float]] = {
        name: [] for name in ("at_own", "at_mean", "common_at_mean", "to_mean", "to_first")
    }
    for draw in range(DRAWS):
        examples = agents.batch(LATER + 1 + draw, batch)
        here, there = learner.gradients(own, *examples), learner.gradients(together, *examples)
        found["at_own"].append(average(here.norm(dim=1)))
        found["at_mean"].append(average(there.norm(dim=1)))
        found["common_at_mean"].append(float(there.mean(dim=0).norm()))
        found["to_mean"].append(average(cosine_similarity(here, mean - own)))
        found["to_first"].append(average(cosine_similarity(here, first - own)))
    exact = learner.gradients(own, *agents.batch(LATER, LARGE))
    return {name: sum(values) / DRAWS for name, values in found.items()} | {
        "at_own_exact": average(exact.norm(dim=1))
    }


def on_agents(learner: Learner, agents: Sinusoids, models: Tensor) -> float:
    """Mean loss of models (a, n) on the agents' own tasks."""
    with torch.no_grad():
        return average(learner.losses(models, *agents.batch(LATER, LARGE)))


def average(values: Tensor) -> float:
    """The mean as a number."""
    return float(values.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for seed in [0] if asked.quick else range(SEEDS):
        key = f"{GROUP}/{seed}"
        if key in RUNS and not asked.quick:
            continue
        short = replace(CLIMB, rounds=2, local=replace(CLIMB.local, steps=5))
        found = measured(seed, short if asked.quick else CLIMB)
        print(json.dumps({name: found[name] for name in found if name != "machine"}), flush=True)
        if not asked.quick:
            RUNS.put(key, plain(found))


if __name__ == "__main__":
    main()
