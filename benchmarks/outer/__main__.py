"""Bytes to the same loss: SparseLoCo and Streaming DiLoCo compared with dense data parallelism.

    python -m benchmarks.outer            all runs; continues where it stopped: 2 to 3 CPU hours
    python -m benchmarks.outer --only sparseloco    those of one contender, after dense's
    python -m benchmarks.outer --quick    a few steps of each, at one rate; nothing is kept

Four workers, threads of one process, train the small GPT of the task shakespeare (LACONIC_DATA names the
folder of its text). Dense data parallelism does STEPS steps; every other contender trains until the mean of
its workers has dense's final test loss of the same seed, or PATIENCE times as many steps. The first seed
chooses among three learning rates, for dense too: by loss for dense, by steps to dense's loss for the others.

Bytes are those that a worker puts on the wire, packet headers included, as `laconic.comm.metered` counts them
(docs/index.md compares it with the interface's own counters); they do not depend on the link.

Results by <contender>-<rate>-<seed> are in benchmarks/outer/results.jsonl: every LOOK steps the test loss and
the megabytes so far. docs/outer.md is made of them.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from benchmarks.common.machine import machine
from benchmarks.common.results import Results, Row
from benchmarks.common.small_net import load_windows
from benchmarks.common.workers import in_turn
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.spec import parse
from laconic.strategies.replica import Replica
from laconic.strategies.several import as_one
from laconic.strategies.strategy import BoundStrategy, Strategy, Update
from laconic.tools.tasks.shakespeare import GPT

RUNS = Results(Path(__file__).with_name("results.jsonl"))
WORKERS, BATCH, STEPS, LOOK, WARMUP = 4, 8, 600, 20, 50
PATIENCE = 2.5
FEWER = 100  # bar: times fewer bytes than dense to its loss, for sparseloco and streaming
HELD = ("sparseloco", "streaming")
SEEDS, RATES = (0, 1, 2), (0.001, 0.002, 0.004)
FOUR_BITS = "scatter_reduce(logquant(levels=7))"  # a sign and a power of two, up and down


@dataclass(frozen=True)
class Contender:
    """`muon`: Muon for the matrices inside layers, AdamW for the rest."""

    name: str
    spec: str
    muon: bool = False


DENSE = Contender("dense", "dense()")
OTHERS = (
    Contender("diloco", "diloco(every=30, momentum=0.9)"),
    Contender(
        "streaming",
        f"diloco(every=30, momentum=0.9, fragments=3, overlap=2, mix=0.5, compressor={FOUR_BITS})",
    ),
    Contender("sparseloco", "sparseloco(every=10, density=0.05)"),
    Contender("sparseloco-rare", "sparseloco()"),  # made for thousands of outer steps, and here has fifty
    Contender("muloco", "diloco(every=30, momentum=0.9)", muon=True),
    Contender("noloco", "noloco(every=30)"),
)


@dataclass(frozen=True)
class Run:
    """One training."""

    contender: Contender
    rate: float
    seed: int

    @property
    def key(self) -> str:
        return f"{self.contender.name}-{self.rate:g}-{self.seed}"

    def read(self, target: float) -> Row | None:
        """Return the stored row of a training to this loss, or None."""
        found = RUNS.get(self.key)
        return found if found is not None and found["target"] == target else None


class Dense(BoundStrategy):
    """Data parallelism: every step takes the mean gradient, in float32."""

    def step_(self, update: Update, loss: float | None) -> None:
        parameters = self.replica.parameters.values()
        mean = torch.cat([each.grad.flatten() for each in parameters if each.grad is not None])
        self.comm.all_reduce(mean).div_(self.comm.size)
        for name, view in self.replica.views(mean).items():
            self.replica.parameters[name].grad = view
        update()


def optimisers(model: nn.Module, contender: Contender, rate: float) -> list[Optimizer]:
    """Return AdamW, or Muon for the matrices of layers and AdamW for the rest, at the same rate."""
    inside = [p for name, p in model.named_parameters() if name.startswith("layers.") and p.dim() == 2]
    if not contender.muon:
        return [AdamW(model.parameters(), lr=rate, weight_decay=0.0)]
    held = {*inside}
    rest = [each for each in model.parameters() if each not in held]
    muon = Muon(inside, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, AdamW(rest, lr=rate, weight_decay=0.0)]


def trained(comm: Loopback, run: Run, data: dict[str, Tensor], steps: int, target: float) -> Row:
    """The curve of one training, the same on all ranks."""
    side, metered = comm.split(0), Metered(comm.split(0))
    model = in_turn(side, GPT, run.seed)
    optimizer = as_one(optimisers(model, run.contender, run.rate))
    replica = Replica(model, optimizer)
    replica.flatten()
    strategy = None if run.contender is DENSE else parse(run.contender.spec)
    bound: BoundStrategy = Dense(replica, metered)
    if isinstance(strategy, Strategy):
        strategy.check(comm.size, optimizer)
        bound = strategy.bind(replica, optimizer, metered, run.seed)
    metered.reset()
    draws = torch.Generator().manual_seed(1000 * run.seed + comm.rank)
    curve: list[tuple[int, float, float]] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = run.rate * min(1.0, (step + 1) / WARMUP)
        chosen = torch.randint(len(data["train_x"]), (BATCH,), generator=draws)
        loss = loss_of(model, data["train_x"][chosen], data["train_y"][chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        bound.step(optimizer.step, loss.item())
        if (step + 1) % LOOK == 0 or step + 1 == steps:
            tested = test(bound, side, model, data)
            curve.append((step + 1, tested, metered.snapshot().network_sent / 1e6))
            if tested <= target:
                break
    bound.drain(side)
    bound.close()
    return {"parameters": replica.layout.numel, "curve": curve}


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy of the next letters."""
    return F.cross_entropy(model(x.long()).flatten(0, 1), y.long().flatten())


@torch.no_grad()
def test(bound: BoundStrategy, side: Loopback, model: nn.Module, data: dict[str, Tensor]) -> float:
    """Return the test loss of the mean model. Each worker tests some of the windows."""
    own, replica = bound.replica.flat.clone(), bound.replica
    replica.flat.copy_(bound.consensus(side))
    part = slice(side.rank, None, side.size)
    total = loss_of(model, data["test_x"][part], data["test_y"][part]).view(1)
    replica.flat.copy_(own)
    return float(side.all_reduce(total)) / side.size


def do(run: Run, data: dict[str, Tensor], target: float = 0.0, steps: int | None = None) -> Row:
    """Return the stored row of a training to this loss; train first if it is missing."""
    if steps is None and (found := run.read(target)) is not None:
        return found
    most = steps or (STEPS if run.contender is DENSE else round(PATIENCE * STEPS))
    began = time.process_time()
    made = Loopback.run(WORKERS, lambda comm: trained(comm, run, data, most, target), timeout_s=600.0)[0]
    about = {"contender": run.contender.name, "spec": run.contender.spec, "rate": run.rate, "seed": run.seed}
    taken = {"workers": WORKERS, "batch": BATCH, "target": target, "machine": machine()}
    row: Row = about | taken | made | {"cpu_s": round(time.process_time() - began, 1)}
    if steps is None:
        RUNS.put(run.key, row)
    step, loss, sent = row["curve"][-1]
    print(
        f"{run.contender.name:10} rate {run.rate:g} seed {run.seed}: loss {loss:.4f} after {step} steps,"
        f" {sent:.3f} MB a worker, {row['cpu_s']:.0f} CPU-s",
        flush=True,
    )
    return row


def final(row: Row) -> tuple[bool, float, float]:
    """Return a key that is smaller for a better run: whether it missed dense's loss, its steps, its loss."""
    step, loss, _ = row["curve"][-1]
    return loss > row["target"], step if row["target"] else 0, loss


def best(rows: Sequence[Row]) -> float:
    """The rate of the best of these runs."""
    rate: float = min(rows, key=final)["rate"]
    return rate


def done(contender: Contender) -> list[Row]:
    """The runs at its best rate that are done, by seed; none while the first seed lacks a rate."""
    targets = {} if contender is DENSE else losses(done(DENSE))
    pilots = [Run(contender, rate, SEEDS[0]).read(targets.get(SEEDS[0], 0.0)) for rate in RATES]
    if any(each is None for each in pilots):
        return []
    rate = best([each for each in pilots if each is not None])
    found = (Run(contender, rate, seed).read(targets.get(seed, 0.0)) for seed in SEEDS)
    return [each for each in found if each is not None]


def losses(rows: Iterable[Row]) -> dict[int, float]:
    """The last test loss of runs, by seed: dense's are what others train to."""
    return {row["seed"]: row["curve"][-1][1] for row in rows}


def play(contender: Contender, data: dict[str, Tensor], targets: dict[int, float]) -> Iterator[Row]:
    """All runs of a contender: the first seed at all rates, the others at the best."""
    first = SEEDS[0]
    rate = best([do(Run(contender, rate, first), data, targets.get(first, 0.0)) for rate in RATES])
    for seed in SEEDS:
        yield do(Run(contender, rate, seed), data, targets.get(seed, 0.0))


def main() -> None:
    """Train the missing runs."""
    options = argparse.ArgumentParser(prog="benchmarks.outer")
    options.add_argument("--quick", action="store_true", help="a few steps of each; nothing is kept")
    options.add_argument("--only", choices=[each.name for each in OTHERS])
    given = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    data = load_windows()
    if given.quick:
        for each in (DENSE, *OTHERS):
            if given.only in (None, each.name):
                do(Run(each, RATES[1], SEEDS[0]), data, steps=2 * LOOK)
        return
    targets = losses(play(DENSE, data, {}))
    for each in OTHERS:
        if given.only in (None, each.name):
            for _ in play(each, data, targets):
                pass


if __name__ == "__main__":
    main()
