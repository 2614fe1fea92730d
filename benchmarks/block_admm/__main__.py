"""Blocks side by side on MNIST: Block-ADMM in three processes beside back-propagation, at equal passes.

    python -m benchmarks.block_admm              every run that is missing
    python -m benchmarks.block_admm --quick      40 steps of each in a scratch folder, to see that all works

An MLP of 784-256-256-10 in three blocks, one a process, over gloo; or with signs or a DeepFacto layer between
blocks, or with weak labels (see weak.py). All runs of a seed see the same batches, and the rate rises and
falls alike. Runs are in benchmarks/block_admm/results.jsonl; a stopped benchmark goes on where it stopped;
`make docs` writes the page.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.block_admm.weak import coarse, digits_wrong
from benchmarks.common.machine import machine
from benchmarks.common.results import Results
from laconic.admm import BlockTrainer, DeepFacto, Proximal
from laconic.tools.report.side_by_side import SHOWN, BlockSeries
from laconic.tools.tasks.blockwise import at_work
from laconic.tools.tasks.mnist import inputs, load
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.task import Recipe, cross_entropy, right_answers

RUNS = Results(Path(__file__).with_name("results.jsonl"))
BAR = 4.0  # % of the test set, that blocks have to stay below
SEEDS, PASSES, BATCH, BLOCKS = (0, 1, 2), 3, 64, 3
WIDTH, RANK = 256, 32
POINTS = 20  # of the curve of residuals
SGD, ADAM = 0.05, 1e-3  # peak rates


def mlp(classes: int = 10) -> nn.Sequential:
    """784-256-256-10 with ReLU, 270 thousand parameters."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, classes),
    )


def signs() -> nn.Sequential:
    """The same with batch norms, and a step function in place of each ReLU."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, WIDTH, bias=False),
        nn.BatchNorm1d(WIDTH),
        Proximal(torch.sign),
        nn.Linear(WIDTH, WIDTH, bias=False),
        nn.BatchNorm1d(WIDTH),
        Proximal(torch.sign),
        nn.Linear(WIDTH, 10),
    )


def factored(classes: int = 10) -> nn.Sequential:
    """The MLP with a non-negative factorisation after its first layer."""
    children = [*mlp(classes)]
    return nn.Sequential(*children[:3], DeepFacto(WIDTH, RANK), *children[3:])


def wide() -> nn.Sequential:
    """Four layers whose blocks take about equal time: 784-1024-1024-1024-10."""
    widths, layers = (784, 1024, 1024, 1024), list[nn.Module]([nn.Flatten()])
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


@dataclass(frozen=True)
class Variant:
    """`spec`: None for back-propagation in one process. `steps`: default: PASSES of all examples.

    `weak`: whether labels are those of `coarse`.
    """

    build: Callable[[], nn.Sequential]
    spec: str | None = None
    optimizer: str = "adam"
    batch: int = BATCH
    steps: int | None = None
    weak: bool = False

    def load(self) -> dict[str, Tensor]:
        """Images and the labels to learn."""
        data = dict(load())
        return data | {key: coarse(data[key]) for key in ("train_y", "test_y") if self.weak}


VARIANTS = {
    "sgd": Variant(mlp, optimizer="sgd"),
    "adam": Variant(mlp),
    "blocks": Variant(mlp, "block_admm(blocks=3)"),
    "blocks, stored": Variant(mlp, "block_admm(blocks=3, mode='batch')"),
    "blocks, 8 bits": Variant(
        mlp, "block_admm(blocks=3, activations=minmax(bits=8), targets=minmax(bits=8))"
    ),
    "signs, adam": Variant(signs),
    "signs, blocks": Variant(signs, "block_admm(blocks=3, beta=0.03)"),
    "deep_facto": Variant(factored, "block_admm(blocks=3)"),
    "weak, adam": Variant(partial(mlp, 2), weak=True),
    "weak, deep_facto": Variant(partial(factored, 2), "block_admm(blocks=3)", weak=True),
    "time line": Variant(wide, "block_admm(blocks=3)", batch=512, steps=40),
}


def made(variant: Variant, parameters: Any) -> torch.optim.Optimizer:
    """The variant's optimiser at its peak rate."""
    if variant.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=SGD, momentum=0.9, nesterov=True)
    return torch.optim.Adam(parameters, lr=ADAM)


def by_back_propagation(variant: Variant, seed: int, steps: int | None) -> dict[str, Any]:
    """One training in one process."""
    data = variant.load()
    torch.manual_seed(seed)
    model = variant.build()
    start = [each.detach().clone() for each in model.parameters()]
    untrained = digits_of(variant, model, "untrained")
    optimizer = made(variant, model.parameters())
    shard = Shard(len(data["train_y"]), variant.batch, 0, 1, seed)
    steps, peak = steps or variant.steps or PASSES * shard.steps_per_epoch, optimizer.param_groups[0]["lr"]
    began = time.thread_time()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = Recipe(mlp, lr=peak).rate(peak, step, steps)
        chosen = shard.indices(step)
        loss = cross_entropy(model(inputs(data["train_x"][chosen], None)), data["train_y"][chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    spent = time.thread_time() - began
    moved = [float((now.detach() - then).norm()) for now, then in zip(model.parameters(), start, strict=True)]
    found = {"error": tested(model, data), "steps": steps, "cpu_s": round(spent, 1), "moved": moved[0]}
    return found | untrained | digits_of(variant, model, "trained")


def by_blocks(variant: Variant, seed: int, steps: int | None) -> dict[str, Any]:
    """One training in three processes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(block, (variant, seed, steps, Path(folder)), nprocs=BLOCKS)
        parts = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(BLOCKS)]
    series = BlockSeries(tuple(tuple(part.pop("steps_at_work")) for part in parts))
    first, last = series.densest()
    every = max(1, series.common // POINTS)
    curve = [slice(at, at + every) for at in range(0, series.common, every)]
    return parts[0] | {
        "cpu_s": round(sum(part["cpu_s"] for part in parts), 1),
        "overlap": series.at_once(),
        "spans": series.spans(first, last),
        "sent_kb": sum(part["sent_kb"] for part in parts),
        "residuals": {
            f"{rank} to {rank + 1}": {
                kind: [series.mean(rank, kind, part) for part in curve] for kind in ("primal", "dual")
            }
            for rank in range(1, BLOCKS)
        },
    }


def block(rank: int, variant: Variant, seed: int, steps: int | None, folder: Path) -> None:
    """One of three processes; it leaves its figures in a file, the first one those of the whole model."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=BLOCKS)
    data = variant.load()
    torch.manual_seed(seed)
    model, spec = variant.build(), variant.spec
    assert spec is not None
    start = [each.detach().clone() for each in model.parameters()]
    options: dict[str, Any] = {}
    if "mode='batch'" in spec:
        options = {"samples": len(data["train_y"]), "folder": folder / "rows"}
    trainer = BlockTrainer(
        model, spec, example=inputs(data["train_x"][:2], None), loss=cross_entropy,
        optimizer=lambda parameters: made(variant, parameters), seed=seed, **options,
    )  # fmt: skip
    shard = Shard(len(data["train_y"]), variant.batch, 0, 1, seed)
    steps = steps or variant.steps or PASSES * shard.steps_per_epoch
    at, before, began = [], trainer.stats(), time.process_time()
    for tick in range(steps + trainer.delay):
        own = min(max(0, tick - trainer.delay + rank), steps - 1)
        trainer.optimizer.param_groups[0]["lr"] = Recipe(mlp, lr=ADAM).rate(ADAM, own, steps)
        if tick < steps:
            ids = shard.indices(tick)
            x = inputs(data["train_x"][ids], None) if rank == 0 else None
            trainer.step(x, data["train_y"][ids], ids if options else None)
        else:
            trainer.drain()
        now = trainer.stats()
        if trainer.delay <= tick < steps:
            at.append(at_work(trainer, before, now))
        before = now
    spent = time.process_time() - began
    sent = (before.activations.sent_bytes + before.targets.sent_bytes) / 1e3 / steps
    found = {"steps": steps, "cpu_s": spent, "sent_kb": sent, "kept_mb": before.kept_bytes / 1e6}
    trainer.gather()
    if rank == 0:
        moved = float((next(model.parameters()).detach() - start[0]).norm())
        found |= {"error": tested(model, data), "moved": moved}
        found |= digits_of(variant, model, "trained") or parts_of(model, data["test_x"])
    trainer.close()
    (folder / f"{rank}.json").write_text(json.dumps(found | {"steps_at_work": at}))
    dist.barrier()
    dist.destroy_process_group()


def digits_of(variant: Variant, model: nn.Sequential, when: str) -> dict[str, Any]:
    """Wrong digits by readouts of a model that learns weak labels, else nothing."""
    return {when: digits_wrong(model, load(), RANK, BATCH)} if variant.weak else {}


def tested(model: nn.Module, data: dict[str, Tensor]) -> float:
    """Wrong answers on the test set by a plain forward pass, in %."""
    model.eval()
    with torch.no_grad():
        parts = zip(data["test_x"].split(500), data["test_y"].split(500), strict=True)
        right = sum(right_answers(model(inputs(x, None)), y) for x, y in parts)
    return 100 * (1 - right / len(data["test_y"]))


@torch.no_grad()
def parts_of(model: nn.Module, images: Tensor) -> dict[str, Any]:
    """Of a DeepFacto layer: what it loses of the test set, its least entries, and a picture of each part.

    A part's picture is the mean of the test images weighted by the part's entry in their codes, with the
    brightest pixel at 255: 28 x 28 bytes as hexadecimal digits.
    """
    layers = [child for child in model.children() if isinstance(child, DeepFacto)]
    if not layers:
        return {}
    (facto,) = layers
    below = nn.Sequential(*[*model.children()][: [*model.children()].index(facto)])
    hidden = torch.cat([below(inputs(x, None)) for x in images.split(500)])
    code = facto.code(hidden)
    means = code.T @ images.flatten(1).float() / code.sum(0).clamp(min=1e-8)[:, None]
    shown = (255 * means / means.amax(1, keepdim=True).clamp(min=1e-8)).round().to(torch.uint8)
    return {
        "reconstruction": facto.error(hidden),
        "least_part": float(facto.parts.min()),
        "least_code": float(code.min()),
        "code_zeros": float((code < 0.01 * code.mean()).float().mean()),
        "parts": [bytes(row.tolist()).hex() for row in shown],
    }


def run_all(runs: Results, steps: int | None, seeds: tuple[int, ...], names: list[str]) -> None:
    """Every run that is not stored yet: first all of one seed, then the next."""
    torch.set_num_threads(1)
    for seed in seeds:
        for name in names:
            key, variant = f"{name.replace(', ', '-').replace(' ', '-')}-{seed}", VARIANTS[name]
            if key in runs:
                continue
            train = by_back_propagation if variant.spec is None else by_blocks
            about = {"name": name, "spec": variant.spec, "seed": seed, "batch": variant.batch}
            row = about | train(variant, seed, steps) | {"shown": SHOWN, "machine": machine()}
            runs.put(key, row)
            print(f"{name}, seed {seed}: {row['error']:.2f} %, {row['cpu_s']} s of processors", flush=True)


def main() -> None:
    """Run what is missing."""
    options = argparse.ArgumentParser(prog="benchmarks.block_admm")
    options.add_argument("--quick", action="store_true", help="few steps, one seed, in a scratch folder")
    options.add_argument("--only", action="append", choices=tuple(VARIANTS), help="this; may be repeated")
    options.add_argument("--seeds", type=int, default=len(SEEDS), help="how many seeds")
    given = options.parse_args()
    names = given.only or list(VARIANTS)
    if given.quick:
        with tempfile.TemporaryDirectory() as folder:
            run_all(Results(Path(folder) / "results.jsonl"), 40, SEEDS[:1], names)
        return
    run_all(RUNS, None, SEEDS[: given.seeds], names)


if __name__ == "__main__":
    from benchmarks.block_admm import __main__ as module  # started processes find functions under this name

    module.main()
