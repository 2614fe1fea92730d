"""What coded activations do to accuracy: trainings on CIFAR-10 that differ in nothing else.

    python -m benchmarks.activations accuracy --net resnet20          three seeds of three variants: 20 min
    python -m benchmarks.activations accuracy --net vgg --seeds 1

Variants of one seed begin with the same weights and see the same batches. `nudged` is dense training whose
first weights differ by a millionth, so it shows how far two trainings come apart by rounding alone. A
training of ResNet-20 and of the VGG-like net has 1,600 steps of 32 images, which is one epoch, at a rate that
falls to 0 as a cosine. Files are in
activations/results.jsonl; a stored run is not repeated.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.common.machine import machine
from benchmarks.common.results import Results, Row
from laconic import activations
from laconic.tools.report.ledger import slug
from laconic.tools.tasks.cifar10 import inputs

RUNS = Results(Path(__file__).with_name("results.jsonl"))
SEEDS, LAST = 3, 50  # steps at the end whose mean loss is kept
NUDGED, NUDGE = "nudged", 1e-6


@dataclass(frozen=True)
class Plan:
    """How a net is trained, and with what kept for backward."""

    steps: int
    batch: int
    lr: float = 0.05
    variants: tuple[str, ...] = ("dense", NUDGED, "comet()")


PLANS = {
    "resnet20": Plan(1600, 32),
    "vgg": Plan(1600, 32, 0.01),  # at 0.05 it stays at chance
    "cnn": Plan(400, 64, variants=("dense", "comet()", "comet(share=0.1)", "blocks(bits=2)")),
}


def key_of(net: str, variant: str, seed: int, plan: Plan) -> str:
    return f"accuracy/{net}-{slug(variant)}-{plan.steps}x{plan.batch}-seed{seed}"


def runs(net: str, seeds: int) -> Iterator[tuple[str, int]]:
    """Variant and seed of each run: all variants of a seed before the next seed."""
    for seed in range(seeds):
        for variant in PLANS[net].variants:
            yield variant, seed


def measure(net: str, seeds: int = SEEDS, steps: int | None = None, stored: Results = RUNS) -> None:
    """Do the runs that are not stored yet. `steps`: other than planned, for a trial."""
    torch.set_num_threads(1)
    plan = PLANS[net] if steps is None else replace(PLANS[net], steps=steps)
    for variant, seed in runs(net, seeds):
        key = key_of(net, variant, seed, plan)
        if key in stored:
            continue
        row = trained(net, variant, seed, plan)
        stored.put(key, row | {"machine": machine()})
        told = f"{net:9} {variant:18} seed {seed}  {100 * row['accuracy']:.2f} %  loss {row['loss']:.4f}"
        print(f"{told}  kept {row['ratio']:.1f} x smaller  {row['cpu_s']:.0f} s of a core", flush=True)


def trained(net: str, variant: str, seed: int, plan: Plan) -> Row:
    """One run: test accuracy, and the mean loss of the last steps."""
    from benchmarks.activations.__main__ import Batches, step, trainer

    batches = Batches(plan.batch, seed)
    model, optimizer, session = trainer(net, "dense" if variant == NUDGED else variant, seed, plan.lr)
    if variant == NUDGED:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + NUDGE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.steps)
    began, losses = time.thread_time(), []
    with session or contextlib.nullcontext():
        for _ in range(plan.steps):
            losses.append(step(model, optimizer, *batches.next()))
            schedule.step()
    spent = time.thread_time() - began
    ratio = activations.measure(model, batches.next()[0], session).ratio if session else 1.0
    model.eval()
    x, y = batches.data["test_x"], batches.data["test_y"].long()
    with torch.no_grad():
        hits = sum(
            int((model(inputs(part, None)).argmax(1) == right).sum())
            for part, right in zip(x.split(500), y.split(500), strict=True)
        )
    told = {"net": net, "variant": variant, "seed": seed}
    told |= {"steps": plan.steps, "batch": plan.batch, "lr": plan.lr}
    loss = statistics.mean(losses[-LAST:])
    return told | {
        "accuracy": hits / len(y), "loss": loss, "ratio": round(ratio, 2), "cpu_s": round(spent, 1)
    }  # fmt: skip
