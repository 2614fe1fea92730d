"""Large batches at equal examples: LARS, LAMB and plain SGD beside the small batch, and the noise scale.

    python -m benchmarks.large_batch            every run that is not stored yet
    python -m benchmarks.large_batch --quick    two short runs, which write nothing

CIFAR-10 and the small CNN of `laconic train`. The small batch is 64; a batch `times` as large takes that much
fewer steps, so that every run sees as many examples. SGD has a good rate of the small batch, LARS and LAMB
have the better of two in short runs at 8 times the batch; `laconic.recipes.large_batch` scales them. The
noise scale is measured on the way, from the first micro-batch of a step and the whole; with it goes what it
predicts: progress per example at batch B is that at the small batch B0 times (B0 + noise) / (B + noise).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common.machine import machine
from benchmarks.common.results import Results
from laconic.core.turn import mix
from laconic.data.draws import order
from laconic.recipes import Accumulation, large_batch
from laconic.recipes.large_batch import Kind
from laconic.tools.tasks.cifar10 import inputs, load, small_cnn

RUNS = Results(Path(__file__).with_name("results.jsonl"))
BASE, EXAMPLES, SEEDS = 64, 327_680, 3
MICRO = 64
RATES: dict[str, float] = {"sgd": 0.05, "lars": 0.1, "lamb": 8e-3}  # at the base batch
POINTS = 32  # of a run, at which the noise is noted
QUICK = 5_120


@dataclass(frozen=True)
class Trial:
    """One training: an optimiser, a batch `times` the base, a seed."""

    kind: Kind
    times: int
    seed: int

    @property
    def key(self) -> str:
        return f"{self.kind}-x{self.times}-{self.seed}"


def trials() -> Iterator[Trial]:
    """All of them, one seed after the other; the comparison at 8 times first, then where each breaks."""
    kinds: tuple[Kind, ...] = ("sgd", "lars", "lamb")
    for seed in range(SEEDS):
        yield Trial("sgd", 1, seed)
        yield from (Trial(kind, 8, seed) for kind in kinds)
    for seed in range(SEEDS):
        yield from (Trial(kind, times, seed) for times in (2, 32, 4, 16) for kind in kinds if kind != "lars")


def train(trial: Trial, examples: int = EXAMPLES) -> dict[str, Any]:
    """Train, test, and give what is to be kept."""
    torch.set_num_threads(1)
    torch.manual_seed(trial.seed)
    data, model = load(), small_cnn()
    batch = BASE * trial.times
    steps = examples // batch
    optimizer, schedule = large_batch(
        model, batch=batch, base_batch=BASE, steps=steps, optimizer=trial.kind, lr=RATES[trial.kind]
    )
    accumulation = Accumulation(batch, most=min(MICRO, batch // 4), ranks=1)
    began, curve, noise = time.thread_time(), list[float](), list[dict[str, float]]()
    for step in range(steps):
        x, y = drawn(data, trial.seed, step, batch)
        optimizer.zero_grad()
        total = 0.0
        for share, rows, labels in accumulation.parts(model, x, y):
            loss = share * F.cross_entropy(model(rows), labels)
            loss.backward()
            total += loss.item()
        optimizer.step()
        schedule.step()
        curve.append(total)
        if accumulation.noise is not None and (step + 1) % max(1, steps // POINTS) == 0:
            now = accumulation.noise
            noise.append({"step": step + 1, "variance": now.variance, "signal": now.signal})
    return {
        "kind": trial.kind,
        "times": trial.times,
        "seed": trial.seed,
        "batch": batch,
        "steps": steps,
        "examples": steps * batch,
        "lr": float(schedule.base_lrs[0]),
        "accuracy": tested(model, data),
        "train_loss": sum(curve[-max(1, steps // 10) :]) / max(1, steps // 10),
        "noise_unit": accumulation.sizes[0],
        "noise": noise,
        "cpu_s": round(time.thread_time() - began, 1),
        "machine": machine(),
    }


def drawn(data: dict[str, Tensor], seed: int, step: int, batch: int) -> tuple[Tensor, Tensor]:
    """A step's images, augmented, and labels; every run of a seed sees the same examples in one order."""
    n, first = len(data["train_y"]), step * batch
    places = torch.arange(first, first + batch)
    chosen = torch.cat(
        [
            order(mix(seed, epoch), n)[places[places // n == epoch] % n]
            for epoch in range(first // n, (first + batch - 1) // n + 1)
        ]
    )
    rng = torch.Generator().manual_seed(mix(seed, first, batch) >> 1)
    return inputs(data["train_x"][chosen], rng), data["train_y"][chosen].long()


def tested(model: nn.Module, data: dict[str, Tensor]) -> float:
    """Share of right answers on the test set."""
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(inputs(x, None)).argmax(1) == y).sum())
            for x, y in zip(data["test_x"].split(500), data["test_y"].split(500), strict=True)
        )
    return right / len(data["test_y"])


def main() -> None:
    """Train what is not there yet."""
    options = argparse.ArgumentParser(prog="benchmarks.large_batch")
    options.add_argument("--quick", action="store_true")
    options.add_argument("--only", help="optimiser and factor, such as lamb-x8")
    given = options.parse_args()
    if given.quick:
        for trial in (Trial("sgd", 1, 0), Trial("lamb", 8, 0)):
            found = train(trial, QUICK)
            print({name: found[name] for name in ("kind", "times", "accuracy", "train_loss", "cpu_s")})
        return
    for trial in trials():
        if trial.key not in RUNS and (given.only is None or trial.key.startswith(f"{given.only}-")):
            row = train(trial)
            RUNS.put(trial.key, row)
            print(trial, row["accuracy"], flush=True)


if __name__ == "__main__":
    main()
