"""How many steps a sparse method needs: the gap to dense training against steps times density.

    python -m benchmarks.sparse_steps            all runs; goes on where it stopped: 4 CPU hours
    python -m benchmarks.sparse_steps --only topk --seed 0    those of one method, with one seed
    python -m benchmarks.sparse_steps --quick    a few steps of each; nothing is kept

With density d, an entry of the gradient is sent about once in 1 / d steps, so a training has to be a multiple
of that before its loss can be compared with dense training's. Four workers, threads of one process, train a
net of 52,000 parameters, whose step takes milliseconds, on CIFAR-10 (LACONIC_DATA names the folder). They
exchange by the same feedback, codecs and reducers as under DDP, and the optimiser is SGD with momentum 0.9,
at a rate that rises for WARMUP steps and falls to 0 as a cosine, whatever the length. Dense training of the
same length and seed begins with the same weights and sees the same batches.

One file a run, benchmarks/results/sparse_steps/<method>-<steps>-<seed>.json: test accuracy and loss after
the last step, the training loss by step, and the megabytes that a worker puts on the wire.
docs/sparse_steps.md is made of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.machine import machine
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.ddp.optimiser import OptimiserHooks
from laconic.exchange.exchange import Exchange
from laconic.exchange.method import lift
from laconic.exchange.rule import Site
from laconic.report.ledger import slug
from laconic.tasks.cifar10 import inputs, load

FOLDER = Path(__file__).parent / "results" / "sparse_steps"
WORKERS, BATCH, LR, WARMUP, POINTS = 4, 16, 0.05, 50, 40
SEEDS = (0, 1, 2)
LENGTHS = {0.01: (250, 500, 1000, 2000, 4000), 0.001: (2500, 5000, 10000, 20000)}  # steps, by density
METHODS = {
    "topk": "topk(density={density:g})",
    "dgc": "dgc(density={density:g}, warmup_steps={tenth})",
    "stc": "stc(density={density:g})",
}
Row = dict[str, Any]


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
    def file(self) -> Path:
        """What is kept of it; where the file is, it is done."""
        return FOLDER / f"{slug(f'{self.method}-{self.density:g}')}-{self.steps}-{self.seed}.json"

    @property
    def dense(self) -> Run:
        """The dense training to compare it with."""
        return Run("dense", 1, self.steps, self.seed)

    def read(self) -> Row | None:
        """What is kept of it, or None."""
        found: Row | None = json.loads(self.file.read_text()) if self.file.exists() else None
        return found


def runs() -> Iterator[Run]:
    """All of them: those of a seed before the next seed, dense before what is compared with it."""
    for seed in SEEDS:
        for density, lengths in LENGTHS.items():
            for steps in lengths:
                yield Run("dense", 1, steps, seed)
                yield from (Run(method, density, steps, seed) for method in METHODS)


def net() -> nn.Module:
    """Three convolutions and two dense layers, 52,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(768, 40),
        nn.ReLU(),
        nn.Linear(40, 10),
    )


class Worker:
    """One of the workers: its model and optimiser, and what exchanges their gradients."""

    def __init__(self, comm: Loopback, run: Run) -> None:
        self.comm, self.metered = comm, Metered(comm.split(0))
        self.model = in_turn(comm, run.seed)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.layout = Layout.of((name, tuple(p.shape)) for p, name in names.items())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9)
        method = lift(parse(run.spec))
        hooks = OptimiserHooks(self.optimizer, names, lambda: self.exchange.step - 1, method.rules)
        self.exchange = Exchange(method, self.layout, self.metered, hooks, run.seed)
        site = Site(self.metered, run.seed, self.exchange.seconds)
        hooks.install([rule.bind(part, hooks, site) for rule, part in method.governed(self.layout)])
        self.bucket = torch.empty(self.layout.numel)
        self.metered.reset()

    def step(self, x: Tensor, y: Tensor) -> float:
        """One step with these examples; their loss."""
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        torch.cat([grad.flatten() for grad in grads], out=self.bucket)
        self.exchange.begin()
        self.exchange.mean_(self.bucket, self.layout)
        self.exchange.end()
        for grad, mean in zip(grads, self.layout.segments.views(self.bucket), strict=True):
            grad.copy_(mean.view(grad.shape))
        self.optimizer.step()
        return loss.item()


def in_turn(comm: Loopback, seed: int) -> nn.Module:
    """The same new model on every rank, made by one after the other, as they share torch's generator."""
    model: nn.Module
    for rank in range(comm.size):
        if rank == comm.rank:
            torch.manual_seed(seed)
            model = net()
        comm.all_reduce(torch.zeros(1))
    return model


def trained(comm: Loopback, run: Run, data: dict[str, Tensor]) -> Row:
    """What comes of a training, on every rank."""
    worker = Worker(comm, run)
    draws = torch.Generator().manual_seed(1000 * run.seed + comm.rank)
    losses = []
    for step in range(run.steps):
        risen, fallen = (step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / run.steps)
        worker.optimizer.param_groups[0]["lr"] = LR * min(1.0, risen) * fallen
        chosen = torch.randint(len(data["train_x"]), (BATCH,), generator=draws)
        losses.append(worker.step(inputs(data["train_x"][chosen], draws), data["train_y"][chosen].long()))
    part = slice(comm.rank, None, comm.size)
    hits, total = tested(worker.model, data["test_x"][part], data["test_y"][part].long())
    mean = comm.all_reduce(torch.tensor([hits, total, *losses], dtype=torch.float64))
    several, n = mean[2:] / comm.size, len(data["test_y"])
    every = max(1, run.steps // POINTS)
    curve = [(end, float(several[end - every : end].mean())) for end in range(every, run.steps + 1, every)]
    return {
        "accuracy": float(mean[0]) / n,
        "test_loss": float(mean[1]) / n,
        "train_loss": statistics.mean(several[-max(1, run.steps // 20) :].tolist()),
        "sent_mb": worker.metered.snapshot().network_sent / 1e6,
        "parameters": worker.layout.numel,
        "curve": [(step, round(loss, 5)) for step, loss in curve],
    }


@torch.no_grad()
def tested(model: nn.Module, x: Tensor, y: Tensor) -> tuple[int, float]:
    """How many of the images are told right, and the sum of their losses."""
    out = torch.cat([model(inputs(each, None)) for each in x.split(500)])
    return int((out.argmax(1) == y).sum()), float(F.cross_entropy(out, y, reduction="sum"))


def do(run: Run, data: dict[str, Tensor], *, keep: bool = True) -> Row:
    """Train, and write the file."""
    began = time.process_time()
    made = Loopback.run(WORKERS, lambda comm: trained(comm, run, data), timeout_s=600.0)[0]
    about = {"method": run.method, "density": run.density, "spec": run.spec, "steps": run.steps}
    taken = {"seed": run.seed, "workers": WORKERS, "batch": BATCH, "lr": LR}
    row: Row = about | taken | made | {"cpu_s": round(time.process_time() - began, 1), "machine": machine()}
    if keep:
        FOLDER.mkdir(parents=True, exist_ok=True)
        temporary = run.file.with_suffix(".part")
        temporary.write_text(json.dumps(row) + "\n")
        temporary.replace(run.file)
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
    given = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    data = dict(load())
    if given.quick:
        for method in ("dense", *METHODS):
            if given.only in (None, method):
                do(Run(method, 1 if method == "dense" else 0.01, 20, 0), data, keep=False)
        return
    for run in runs():
        wanted = given.only in (None, run.method) and given.seed in (None, run.seed)
        if wanted and run.read() is None:
            do(run, data)


if __name__ == "__main__":
    main()
