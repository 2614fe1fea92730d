"""ResNet-9 on CIFAR-10 by many methods: 18 epochs, each method at its own learning rate.

    python -m benchmarks.resnet9                    width 16; continues where it stopped
    python -m benchmarks.resnet9 --minutes 60       begin no run after an hour
    python -m benchmarks.resnet9 --only "sign()"    the runs of one method
    python -m benchmarks.resnet9 --width 64 --device cuda    full width, on a GPU
    python -m benchmarks.resnet9 --quick            a few steps of each method; nothing is kept

4 workers take 128 images per step each, or 8 workers 64 each, in bf16 autocast, by SGD with Nesterov
momentum 0.9, weight decay 5e-4 and label smoothing 0.1. The learning rate rises for a fifth of the steps and
falls to 0. Each method's peak rate is found by short runs, a fifth as long and with the first seed: 0.4, then
twice and half of the best, until both neighbours of the best have a larger test loss. Presets are trained
with three seeds and by 8 workers too, all others with one seed.

Workers are threads of one process. LACONIC_DATA names the folder of the images. Results by
<width>x<workers>/<method>-<rate>-<seed>-<steps> are in benchmarks/resnet9/results.jsonl; `make docs` writes
docs/resnet9.md from them.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.machine import machine
from benchmarks.common.rates import next_rate
from benchmarks.common.results import Results, Row
from benchmarks.resnet9.model import Data, prepared, raw
from benchmarks.resnet9.rank import PEAK, Rank
from laconic.comm.loopback import Loopback
from laconic.core.errors import NonFiniteError
from laconic.tools.report.ledger import slug

RUNS = Results(Path(__file__).with_name("results.jsonl"))
SEEDS, WORKERS, MORE_WORKERS, BATCH = (0, 1, 2), 4, 8, 512  # BATCH: images of all workers in a step
EPOCH, EPOCHS = 97, 18  # steps, epochs
STEPS = EPOCHS * EPOCH
SHORT, POINTS = STEPS // 5, 60
DIVERGED = "diverged"
PRESETS = ("dense()", "cgx(bits=4)", "stc(density=0.01)", "diloco(every=20)")
OTHERS = (
    "dgc(density=0.01, warmup_steps={})",
    "topk(density=0.01)",
    "deft(density=0.01)",
    "sketchml(density=0.02)",
    "oktopk(density=0.01)",
    "powersgd(rank=2)",
    "sign()",
    "dgc(density=0.001, warmup_steps={})",
    "sgp()",
    "local_sgd(every=10)",
    "sparseloco(every=10, density=0.05)",
)
METHODS = (*PRESETS, *OTHERS)  # {}: steps of the density warm-up


@dataclass(frozen=True)
class Run:
    """One training."""

    method: str
    rate: float
    seed: int = SEEDS[0]
    steps: int = STEPS
    workers: int = WORKERS
    width: int = 16

    @property
    def spec(self) -> str:
        """The method, with a warm-up of 4 epochs in 18."""
        return self.method.format(4 * self.steps // EPOCHS)

    @property
    def key(self) -> str:
        folder = f"{self.width}x{self.workers}"
        return f"{folder}/{slug(self.spec)}-{self.rate:g}-{self.seed}-{self.steps}"

    def read(self) -> Row | None:
        """Return the stored row, or None."""
        return RUNS.get(self.key)


def losses(method: str, width: int) -> dict[float, float]:
    """Return the test loss of the short runs that are done, by rate, in the order of the search."""
    found: dict[float, float] = {}
    while (rate := next_rate(found, PEAK)) is not None:
        row = Run(method, rate, steps=SHORT, width=width).read()
        if row is None:
            break
        found[rate] = math.inf if DIVERGED in row else row["test_loss"]
    return found


def own_rate(method: str, width: int) -> float | None:
    """Return the method's own rate, or None while the search is going on."""
    found = losses(method, width)
    if next_rate(found, PEAK) is not None:
        return None
    return min(found, key=lambda rate: found[rate])


def due(width: int, only: str | None = None) -> Iterator[Run]:
    """Yield what is not done; each run has to be stored before the next is asked for.

    Searches and the first seed come first, then the other seeds of presets, then more workers.
    """
    wanted = [method for method in METHODS if only in (None, method)]
    for method in wanted:
        while (rate := next_rate(losses(method, width), PEAK)) is not None:
            yield Run(method, rate, steps=SHORT, width=width)
        yield from missing(method, width, SEEDS[:1], WORKERS)
    presets = [method for method in PRESETS if method in wanted]
    for seed in SEEDS[1:]:
        for method in presets:
            yield from missing(method, width, (seed,), WORKERS)
    for seed in SEEDS:
        for method in presets:
            yield from missing(method, width, (seed,), MORE_WORKERS)


def missing(method: str, width: int, seeds: tuple[int, ...], workers: int) -> Iterator[Run]:
    """Yield the full runs of a method that are not done."""
    rate = own_rate(method, width)
    assert rate is not None
    for seed in seeds:
        run = Run(method, rate, seed, workers=workers, width=width)
        if run.read() is None:
            yield run


def train(run: Run, images: Data, device: torch.device, stop: int | None = None) -> Row:
    """Train and test; a training that diverges is a result too. `stop`: after so many steps, for a trial.

    Of the result: `accuracies` after each epoch, of the workers' own models; after the last, as `accuracy`,
    of their mean. `smaller`: times fewer bytes than dense training. `curve`: training loss, means over steps.
    """
    began = time.process_time(), time.monotonic()

    def ranks(comm: Loopback) -> Row:
        rank = Rank(comm, run.spec, images, device, BATCH // run.workers, run.width, run.seed, run.rate)
        part, count = slice(comm.rank, None, comm.size), len(images["test_y"])
        lost, right = [], []
        for step in range(stop or run.steps):
            lost.append(float(rank.step(step, run.steps)))
            if run.steps == STEPS and (step + 1) % EPOCH == 0 and step + 1 < STEPS:
                right.append(rank.tested(part)[0])
        smaller, sent = rank.smaller(len(lost)), rank.metered.snapshot().network_sent
        rank.by.settle()
        last, test_loss = rank.tested(part)
        sums = comm.all_reduce(torch.tensor([test_loss, *right, last, *lost], dtype=torch.float64))
        accuracies = (sums[1 : len(right) + 2] / count).tolist()
        losses = (sums[len(right) + 2 :] / comm.size).split(max(1, len(lost) // POINTS))
        return {
            "accuracy": accuracies[-1],
            "test_loss": float(sums[0]) / count,
            "smaller": smaller,
            "sent_mb": sent / 1e6,
            "parameters": sum(each.numel() for each in rank.model.parameters()),
            "accuracies": accuracies,
            "curve": [round(float(each.mean()), 4) for each in losses],
        }

    told = {"spec": run.spec, "lr": run.rate, "seed": run.seed, "steps": run.steps, "workers": run.workers}
    try:
        found = Loopback.run(run.workers, ranks, timeout_s=600.0)[0]
        if not math.isfinite(found["test_loss"]):
            found = {DIVERGED: f"the test loss is {found['test_loss']}"}
    except NonFiniteError as error:
        found = {DIVERGED: str(error)}
    taken = {
        "cpu_s": round(time.process_time() - began[0], 1),
        "took_s": round(time.monotonic() - began[1], 1),
    }
    return told | {"batch": BATCH // run.workers, "width": run.width} | found | taken


def main() -> None:
    """Train what is not done."""
    options = argparse.ArgumentParser(prog="benchmarks.resnet9")
    options.add_argument("--width", type=int, default=16, help="channels of the first convolution; 64: full")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--minutes", type=float, default=math.inf, help="begin no run after these")
    options.add_argument("--only", choices=METHODS, metavar="METHOD", help="one of: " + ", ".join(METHODS))
    options.add_argument("--quick", action="store_true", help="a few steps of each; nothing is kept")
    asked = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    device, began = torch.device(asked.device), time.monotonic()
    images = prepared(raw(), device)
    if asked.quick:
        for method in METHODS:
            if asked.only in (None, method):
                report(Run(method, PEAK, width=asked.width), images, device, stop=4)
        return
    for run in due(asked.width, asked.only):
        if time.monotonic() - began > 60 * asked.minutes:
            break
        RUNS.put(run.key, report(run, images, device) | {"machine": on(device)})


def report(run: Run, images: Data, device: torch.device, stop: int | None = None) -> Row:
    """Train, and print a line on the result."""
    row = train(run, images, device, stop)
    told = row.get(DIVERGED) or f"accuracy {100 * row['accuracy']:.2f} %, test loss {row['test_loss']:.4f}"
    print(f"{run.spec:44} rate {run.rate:<6g} seed {run.seed}, {run.workers} workers: {told}", flush=True)
    return row


def on(device: torch.device) -> Row:
    """Return what the run was measured on."""
    return machine() | ({"gpu": torch.cuda.get_device_name()} if device.type == "cuda" else {})


if __name__ == "__main__":
    main()
