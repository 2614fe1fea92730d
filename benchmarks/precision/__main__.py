"""Precision and compression: every precision with every method, beside float32 at equal steps.

    python -m benchmarks.precision              all cells, 3 seeds; goes on where it stopped
    python -m benchmarks.precision --quick      20 steps, one seed, not kept

Results by <precision>-<method>-<seed> are in benchmarks/precision/results.jsonl: loss over the last steps,
test loss and accuracy, bytes on the wire, skipped steps. Two workers on this machine train the mlp of the
task digits; they are started once and train all cells one after the other.

Precisions: `fp32`; `bf16` and `fp16` are autocast, with parameters in float32; `*-params` are models whose
parameters are 16 bits wide, alone, with master weights, or rounded at random.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common.machine import machine
from benchmarks.common.results import Results
from laconic.optim import master_weights
from laconic.strategies.distribute import distribute, strategy_or_method
from laconic.strategies.distributed_optimizer import DistributedOptimizer
from laconic.tools.report.ledger import slug
from laconic.tools.tasks.digits import DIGITS
from laconic.tools.tasks.shard import Shard

RUNS = Results(Path(__file__).with_name("results.jsonl"))
TASK, MODEL, BATCH, STEPS, WORKERS, SEEDS = DIGITS, "mlp", 16, 100, 2, (0, 1, 2)
TAIL = 20  # steps whose losses are averaged
FIRST_SCALE = 2.0**20  # sixteen times torch's, so that there is an overflow to find
METHODS = (
    "dense()",
    "fp16()",
    "cgx()",
    "dgc(density=0.01, warmup_steps=30)",
    "powersgd(rank=2)",
    "onebit_adam(warmup_steps=40)",
    "diloco(every=10)",
    "sgp()",
)


@dataclass(frozen=True)
class Precision:
    """`autocast`: of forward and backward; `params`: of the model; `masters`: the rounding, or None."""

    autocast: torch.dtype | None = None
    params: torch.dtype = torch.float32
    masters: Any = None

    @property
    def scaled(self) -> bool:
        """Whether gradients are in float16, and need loss scaling."""
        return torch.float16 in (self.autocast, self.params)


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(autocast=torch.bfloat16),
    "fp16": Precision(autocast=torch.float16),
    "bf16-params": Precision(params=torch.bfloat16),
    "bf16-params-masters": Precision(params=torch.bfloat16, masters="nearest"),
    "bf16-params-stochastic": Precision(params=torch.bfloat16, masters="stochastic"),
    "fp16-params-masters": Precision(params=torch.float16, masters="nearest"),
}


@dataclass(frozen=True)
class Cell:
    """One training."""

    precision: str
    method: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.precision}-{slug(self.method)}-{self.seed}"


def cells(seeds: tuple[int, ...] = SEEDS) -> Iterator[Cell]:
    """All of them, one seed after the other."""
    for seed in seeds:
        for precision in PRECISIONS:
            for method in METHODS:
                yield Cell(precision, method, seed)


def trained(cell: Cell, data: dict[str, Tensor], steps: int) -> dict[str, Any]:
    """The figures of one training, equal on all ranks."""
    precision, spec = PRECISIONS[cell.precision], strategy_or_method(cell.method)
    recipe, began = TASK.recipe(MODEL), time.process_time()
    torch.manual_seed(cell.seed)
    plain = recipe.build().to(precision.params)
    updates = recipe.optimizer(plain, None, spec)
    if precision.masters:
        master_weights(updates, rounding=precision.masters, seed=cell.seed)
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE) if precision.scaled else None
    model, optimizer = distribute(plain, updates, spec, seed=cell.seed, scaler=scaler)
    shard = Shard(len(data["train_y"]), BATCH, dist.get_rank(), dist.get_world_size(), cell.seed)
    peak, losses, halfway, scales = float(optimizer.param_groups[0]["lr"]), [], 0, []
    for step in range(steps):
        if step == steps // 2:
            halfway = optimizer.stats().network_sent
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(peak, step, steps)
        chosen = shard.indices(step)
        loss = loss_of(model, data["train_x"][chosen], data["train_y"][chosen], precision)
        optimizer.zero_grad()
        stepped(loss, optimizer, scaler)
        losses.append(loss.detach())
        scales.append(1.0 if scaler is None else scaler.get_scale())
    sent = optimizer.stats().network_sent
    with optimizer.averaged():
        tested = test(plain, data, precision)
    mean = torch.stack(losses[-TAIL:]).mean()
    dist.all_reduce(mean)
    return {
        "precision": cell.precision,
        "method": cell.method,
        "seed": cell.seed,
        "steps": steps,
        "workers": dist.get_world_size(),
        "train_loss": float(mean) / dist.get_world_size(),
        **tested,
        "wire_kb": (sent - halfway) / (steps - steps // 2) / 1000,
        "skipped": sum(b < a for a, b in pairwise([FIRST_SCALE, *scales])) if scaler else 0,
        "loss_scale": scales[-1],
        "cpu_s": round(time.process_time() - began, 2),
        "machine": machine(),
    }


def loss_of(model: nn.Module, x: Tensor, y: Tensor, precision: Precision) -> Tensor:
    """The mean cross-entropy in float32."""
    inputs = TASK.inputs(x, None).to(precision.params)
    with torch.autocast("cpu", precision.autocast, enabled=precision.autocast is not None):
        logits = model(inputs)
    return F.cross_entropy(logits.float(), y.long())


def stepped(loss: Tensor, optimizer: DistributedOptimizer, scaler: torch.amp.GradScaler | None) -> None:
    """Backward and step, with loss scaling where there is a scaler."""
    if scaler is None:
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()


@torch.no_grad()
def test(model: nn.Module, data: dict[str, Tensor], precision: Precision) -> dict[str, float]:
    """Loss and accuracy on the test set."""
    with torch.autocast("cpu", precision.autocast, enabled=precision.autocast is not None):
        logits = model(TASK.inputs(data["test_x"], None).to(precision.params)).float()
    right = (logits.argmax(1) == data["test_y"]).float().mean()
    return {
        "test_loss": float(F.cross_entropy(logits, data["test_y"].long())),
        "accuracy": float(right),
    }


def work(rank: int, port: int, wanted: list[Cell], steps: int, kept: bool) -> None:
    """One worker: all cells, one after the other; the first one writes."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS)
    data = TASK.load(None)
    for cell in wanted:
        figures = trained(cell, data, steps)
        if rank == 0:
            told = ("train_loss", "test_loss", "accuracy", "wire_kb", "skipped", "cpu_s")
            print(cell, {name: round(figures[name], 4) for name in told}, flush=True)
        if rank == 0 and kept:
            RUNS.put(cell.key, figures)
        dist.barrier()
    os._exit(0)


def results() -> list[dict[str, Any]]:
    """All runs that are done, in the order of `cells`."""
    return [row for cell in cells() if (row := RUNS.get(cell.key)) is not None]


def main() -> None:
    """Train what is not done."""
    options = argparse.ArgumentParser(prog="benchmarks.precision")
    options.add_argument("--quick", action="store_true", help="20 steps, one seed; nothing is kept")
    quick = options.parse_args().quick
    wanted = [cell for cell in cells((0,) if quick else SEEDS) if quick or cell.key not in RUNS]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    forkserver.set_forkserver_preload(["benchmarks.precision.__main__", "torch._dynamo"])
    context = multiprocessing.get_context("forkserver")
    given = (store.port, wanted, 20 if quick else STEPS, not quick)
    workers = [context.Process(target=work, args=(rank, *given)) for rank in range(WORKERS)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            worker.kill()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a worker failed: its error is above; run again to go on")


if __name__ == "__main__":
    from benchmarks.precision import __main__ as module  # started processes find functions under this name

    module.main()
