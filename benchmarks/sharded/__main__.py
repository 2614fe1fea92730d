"""FSDP2 with few bits both ways: bytes of all-gathers and reduce-scatters, and the loss, beside dense.

    python -m benchmarks.sharded                 all runs; goes on where it stopped
    python -m benchmarks.sharded --only four     those of one contender
    python -m benchmarks.sharded --quick         a few steps of each; nothing is kept

Four ranks, processes over gloo on this machine, train the GPT of 10.8 million parameters on Shakespeare
(LACONIC_DATA names the folder of its text), one window of 64 letters a rank and step, AdamW.

Bytes are those that rank 0 puts on the wire, packet headers included, as `laconic.comm.metered` counts them.
Dense goes through the same counted collectives, every element in float32. Tests gather parameters, too: these
bytes are left out.

Results by <contender>-<seed> are in benchmarks/sharded/results.jsonl; `make docs` fills docs/sharded.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

import laconic
from benchmarks.common.machine import machine
from benchmarks.common.results import Results, Row
from laconic.fsdp.handle import ShardedHandle
from laconic.tools.tasks.shakespeare import gpt_10m, load

RUNS = Results(Path(__file__).with_name("results.jsonl"))
WORKERS, BATCH, STEPS, LOOK, WARMUP, TESTED = 4, 1, 500, 100, 50, 128
RATE, SEEDS, WITHIN = 0.0005, (0, 1, 2), 0.01


@dataclass(frozen=True)
class Contender:
    """`bar`: times fewer bytes than dense's, of each collective."""

    name: str
    spec: str
    parameters: str
    bar: float = 1.0

    def read(self, seed: int) -> Row | None:
        """Return the stored row, or None."""
        return RUNS.get(f"{self.name}-{seed}")


DENSE = Contender("dense", "scatter_reduce(dense())", "dense()")
OTHERS = (
    Contender("eight", "cgx(bits=8)", "minmax(bits=8)", 3.5),
    Contender("four", "cgx(bits=4)", "rotated(minmax(bits=4))", 7.0),
)
CONTENDERS = {each.name: each for each in (DENSE, *OTHERS)}


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy of the next letters."""
    return F.cross_entropy(model(x.long()).flatten(0, 1), y.long().flatten())


class Ends(nn.Module):
    """A model whose output is no view: of these `fully_shard` warns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x).clone()
        return out


def tested(model: nn.Module, data: dict[str, Tensor]) -> float:
    """The mean test loss, of which each rank looks at some of the windows, evenly apart."""
    every = len(data["test_x"]) // TESTED
    part = slice(dist.get_rank() * every, TESTED * every, WORKERS * every)
    with torch.no_grad():
        total = loss_of(model, data["test_x"][part], data["test_y"][part])
    dist.all_reduce(total)
    return float(total) / WORKERS


def counted(handle: ShardedHandle) -> Counter[str]:
    """Bytes on the wire so far, by what they are."""
    return Counter(
        all_gather=handle._within.comm.snapshot().network_sent,
        reduce_scatter=handle._shards.comm.snapshot().network_sent,
    )


def train(rank: int, contender: Contender, seed: int, steps: int, folder: str) -> None:
    """One rank of a run; the first writes what came of it."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORKERS)
    wait = timedelta(seconds=600)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS, timeout=wait)
    data = dict(load())
    torch.manual_seed(seed)
    model = Ends(gpt_10m())
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)  # type: ignore[arg-type]
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    handle = laconic.compress(model, optimizer, contender.spec, seed=seed, parameters=contender.parameters)
    assert isinstance(handle, ShardedHandle)
    sent: Counter[str] = Counter()  # bytes of training
    draws = torch.Generator().manual_seed(1000 * seed + rank)
    parameters = sum(each.numel() for each in model.parameters())
    curve: list[tuple[int, float]] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARMUP)
        chosen = torch.randint(len(data["train_x"]), (BATCH,), generator=draws)
        sent.subtract(counted(handle))
        optimizer.zero_grad()
        loss_of(model, data["train_x"][chosen], data["train_y"][chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        sent.update(counted(handle))
        if (step + 1) % LOOK == 0 or step + 1 == steps:
            curve.append((step + 1, tested(model, data)))
    cpu_s = torch.tensor(resource.getrusage(resource.RUSAGE_SELF)[0])
    dist.all_reduce(cpu_s)
    if rank == 0:
        row = {"parameters": parameters, "curve": curve, "cpu_s": round(float(cpu_s), 1), **sent}
        Path(folder, "row.json").write_text(json.dumps(row))
    handle.remove()
    dist.destroy_process_group()


def do(contender: Contender, seed: int, steps: int | None = None) -> Row:
    """What is kept of a run, which is trained if it is not."""
    if steps is None and (found := contender.read(seed)) is not None:
        return found
    with tempfile.TemporaryDirectory() as folder:
        spawn(train, (contender, seed, steps or STEPS, folder), nprocs=WORKERS)  # type: ignore[no-untyped-call]
        made = json.loads(Path(folder, "row.json").read_text())
    about = {"contender": contender.name, "spec": contender.spec, "parameters_spec": contender.parameters}
    taken = {"seed": seed, "workers": WORKERS, "batch": BATCH, "rate": RATE, "machine": machine()}
    row: Row = about | taken | made
    if steps is None:
        RUNS.put(f"{contender.name}-{seed}", row)
    step, loss = row["curve"][-1]
    print(
        f"{contender.name:10} seed {seed}: loss {loss:.4f} after {step} steps, all-gather"
        f" {row['all_gather'] / step / 1e6:.3f} MB a step, reduce-scatter"
        f" {row['reduce_scatter'] / step / 1e6:.3f}, {row['cpu_s']:.0f} CPU-s",
        flush=True,
    )
    return row


def done(contender: Contender) -> list[Row]:
    """The runs that are done, by seed."""
    return [row for seed in SEEDS if (row := contender.read(seed)) is not None]


def main() -> None:
    """Train what is not done."""
    options = argparse.ArgumentParser(prog="benchmarks.sharded")
    options.add_argument("--quick", action="store_true", help="a few steps of each; nothing is kept")
    options.add_argument("--only", choices=list(CONTENDERS))
    options.add_argument("--seed", type=int, choices=SEEDS)
    given = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = [each for each in CONTENDERS.values() if given.only in (None, each.name)]
    for seed in SEEDS if given.seed is None else (given.seed,):
        for each in chosen:
            do(each, seed, steps=4 if given.quick else None)
        if given.quick:
            return


if __name__ == "__main__":
    from benchmarks.sharded import __main__ as module  # started processes find functions under this name

    module.main()
