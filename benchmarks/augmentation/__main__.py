"""Batch augmentation at equal updates: four copies of each example beside one.

    python -m benchmarks.augmentation            every run that is not stored yet
    python -m benchmarks.augmentation --quick    two short runs, which write nothing

CIFAR-10 and the small CNN of `laconic train`, 64 examples a step, cropped, mirrored and with a patch cut out.
All runs take the same steps on the same examples in the same order at the same rates; M copies of each
compute M times as much. "M=1, batch x 4" is that compute with four times as many examples instead, at the
same rate. Examples are loaded by `laconic.data.batch_augmentation`, which reads one once for all its copies;
reads are counted.
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
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.common.machine import machine
from benchmarks.common.results import Results
from benchmarks.large_batch.__main__ import tested
from laconic.data import batch_augmentation
from laconic.recipes import Copies, large_batch
from laconic.tools.tasks.cifar10 import inputs, load, small_cnn

RUNS = Results(Path(__file__).with_name("results.jsonl"))
BATCH, STEPS, SEEDS, TESTS = 64, 1_200, 3, 6
RATE = 0.05
QUICK = 40


@dataclass(frozen=True)
class Variant:
    """Copies of each example, examples of a step, and options of `Copies`."""

    name: str
    copies: int
    batch: int = BATCH
    options: tuple[tuple[str, Any], ...] = ()


VARIANTS = (
    Variant("M=1", 1),
    Variant("M=4", 4),
    Variant("M=1, batch x 4", 1, 4 * BATCH),
    Variant("M=4, averaged outputs", 4, options=(("outputs", "averaged"),)),
    Variant("M=4, corrected norm", 4, options=(("correct_every", 20),)),
)


class Counted(Dataset[tuple[Tensor, int]]):
    """Training images as bytes, with their labels; counts what is read."""

    def __init__(self, data: dict[str, Tensor]) -> None:
        self.x, self.y, self.read = data["train_x"], data["train_y"].tolist(), 0

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        self.read += 1
        return self.x[number], self.y[number]


def augment(example: tuple[Tensor, int], rng: torch.Generator) -> tuple[Tensor, int]:
    """Cropped and mirrored at random, with a patch of 8 x 8 pixels set to the mean (cutout)."""
    x = inputs(example[0][None], rng)[0]
    top, left = torch.randint(0, 25, (2,), generator=rng).tolist()
    x[:, top : top + 8, left : left + 8] = 0
    return x, example[1]


def trials() -> Iterator[tuple[Variant, int, str]]:
    """All of them with their keys; the pair that matters first."""
    for part in (VARIANTS[:2], VARIANTS[2:]):
        for seed in range(SEEDS):
            for variant in part:
                name = "".join(letter if letter.isalnum() else "_" for letter in variant.name)
                yield variant, seed, f"{name}-{seed}"


def train(variant: Variant, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """Train, test a few times on the way, and give what is to be kept."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data, model = load(), small_cnn()
    images = Counted(data)
    plain = DataLoader(images, batch_size=variant.batch, shuffle=True)
    loader = batch_augmentation(plain, variant.copies, "batch", augment=augment, seed=seed, rank=0, size=1)
    optimizer, schedule = large_batch(
        model, batch=BATCH, base_batch=BATCH, steps=steps, optimizer="sgd", lr=RATE, warmup_steps=steps // 20
    )
    copies = Copies(variant.copies, **dict(variant.options))
    began, curve, batches = time.thread_time(), list[list[float]](), iter(loader)
    for step in range(1, steps + 1):
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        optimizer.zero_grad()
        loss = copies.backward(model, F.cross_entropy, x, y)
        optimizer.step()
        schedule.step()
        if step % (steps // TESTS) == 0:
            curve.append([step, tested(model, data), float(loss)])
            model.train()
    return {
        "variant": variant.name,
        "copies": variant.copies,
        "batch": variant.batch,
        "seed": seed,
        "steps": steps,
        "accuracy": curve[-1][1],
        "curve": curve,
        "inputs": steps * variant.batch * variant.copies,
        "read": images.read,
        "cpu_s": round(time.thread_time() - began, 1),
        "machine": machine(),
    }


def main() -> None:
    """Train what is not there yet."""
    options = argparse.ArgumentParser(prog="benchmarks.augmentation")
    options.add_argument("--quick", action="store_true")
    if options.parse_args().quick:
        for variant in VARIANTS[:2]:
            found = train(variant, 0, QUICK)
            print({name: found[name] for name in ("variant", "accuracy", "inputs", "read", "cpu_s")})
        return
    for variant, seed, key in trials():
        if key not in RUNS:
            row = train(variant, seed)
            RUNS.put(key, row)
            print(variant.name, seed, row["accuracy"], flush=True)


if __name__ == "__main__":
    main()
