"""Sparse training on CIFAR-10: dense, static random masks, sparse evolution (SET), RigL and gradual pruning.

    python -m benchmarks.rigl                train; goes on where it stopped: one JSON a run
    python -m benchmarks.rigl --width 2      some with twice as many channels, to see what becomes of gaps
    python -m benchmarks.rigl --times 4      some 4 times as long, to see the same
    python -m benchmarks.rigl forward        size and time of a forward pass: dense, and exported as CSR
    python -m benchmarks.rigl letters        an LSTM on Shakespeare: dense, RigL and static masks
    python -m benchmarks.rigl flops          operations of ResNet-50, as a share of the dense net's
    python -m benchmarks.rigl traffic        bytes of gradients among four processes
    python -m benchmarks.rigl --quick        a few steps of each, written nowhere

A ResNet of three blocks at 16, 32 and 64 channels whose first convolution has stride 2: 75 thousand weights.
All runs have the same batches, the same number of steps and the same schedule of the rate, one process and
one thread each. Results are in benchmarks/rigl/results.jsonl; keys begin with another width or length.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.machine import machine
from benchmarks.common.results import Results
from laconic import compress
from laconic.sparsity import export, nbytes, sparsify
from laconic.sparsity.static_masks import StaticMasks
from laconic.tools.tasks.cifar10 import Block, inputs, load, resnet20
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.task import Recipe, cross_entropy, right_answers

RUNS = Results(Path(__file__).with_name("results.jsonl"))
DENSITIES = (0.2, 0.1)
SPARSIFIERS = ("rigl", "static_masks", "sparse_evolution", "gradual_pruning")
SEEDS = (0, 1, 2)
STEPS, BATCH, LR = 2400, 64, 0.1
EVERY = 50
WORKERS = 4
OTHERS = ("forward", "letters", "flops", "traffic")
# at another width or length
AGAIN = ("dense", f"rigl(density=0.2, every={EVERY})", "static_masks(density=0.2)")


def small_resnet(width: int = 1) -> nn.Module:
    """Images float32 (n, 3, 32, 32) to logits (n, 10). With `width` times as many channels."""
    first, second, third = (width * channels for channels in (16, 32, 64))
    model = nn.Sequential(
        nn.Conv2d(3, first, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        Block(first, first),
        Block(first, second),
        Block(second, third),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(third, 10),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    return model


def specs() -> list[str]:
    """The dense model, then each sparsifier at each density."""
    found = ["dense"]
    for name in SPARSIFIERS:
        every = "" if name == "static_masks" else f", every={EVERY}"
        found += [f"{name}(density={density}{every})" for density in DENSITIES]
    return found


def key_of(spec: str, seed: int, width: int = 1, times: int = 1) -> str:
    """Return the key of a run. One of `width` and `times` is 1."""
    group = f"width{width}/" if width > 1 else f"times{times}/" if times > 1 else ""
    name = spec.translate(str.maketrans({c: "-" for c in "(=, )"})).strip("-")
    return f"{group}{name}-seed{seed}"


def train(
    spec: str, seed: int, data: dict[str, torch.Tensor], steps: int = STEPS, width: int = 1
) -> dict[str, Any]:
    """One training; its accuracy on the test set, the density and the seconds of processor time."""
    torch.manual_seed(seed)
    recipe = Recipe(partial(small_resnet, width), lr=LR)
    model = recipe.build()
    optimizer = recipe.optimizer(model)
    sparse = None if spec == "dense" else sparsify(model, optimizer, spec, steps=steps, seed=seed)
    shard = Shard(len(data["train_y"]), BATCH, 0, 1, seed)
    began, losses = time.process_time(), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(LR, step, steps)
        chosen = shard.indices(step)
        x, y = inputs(data["train_x"][chosen], shard.rng(step)), data["train_y"][chosen]
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    seconds = time.process_time() - began
    weights = [each for each in model.parameters() if each.dim() > 1]
    used = sum(int((weight != 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)
    return {
        "spec": spec,
        "seed": seed,
        "steps": steps,
        "weights": sum(weight.numel() for weight in weights),
        "batch": BATCH,
        "lr": LR,
        "accuracy": accuracy(model, data),
        "train_loss": sum(losses[-100:]) / len(losses[-100:]),
        "density": sparse.stats().density if sparse else 1.0,
        "not_zero": used,
        "updates": sparse.stats().updates if sparse else 0,
        "cpu_s": seconds,
        "machine": machine(),
    }


def accuracy(model: nn.Module, data: dict[str, torch.Tensor]) -> float:
    """The share of right answers on the test set."""
    model.eval()
    right = 0
    with torch.no_grad():
        for start in range(0, len(data["test_y"]), 500):
            part = slice(start, start + 500)
            right += right_answers(model(inputs(data["test_x"][part], None)), data["test_y"][part])
    return right / len(data["test_y"])


def train_all(seeds: Sequence[int], quick: bool, width: int, times: int) -> None:
    """Every run that is not there yet, one seed after the other."""
    data = load()
    for seed in seeds[:1] if quick else seeds:
        for spec in specs() if width == times == 1 else AGAIN:
            key = key_of(spec, seed, width, times)
            if quick:
                print(train(spec, seed, data, 4, width)["train_loss"], spec)
            elif key not in RUNS:
                result = train(spec, seed, data, times * STEPS, width)
                RUNS.put(key, result)
                print(
                    f"{spec}, seed {seed}: {100 * result['accuracy']:.2f} %, {result['cpu_s']:.0f} s",
                    flush=True,
                )


def forward(quick: bool) -> None:
    """Bytes and milliseconds of a forward pass, dense and exported, on one thread."""
    layers = {
        "linear 1024 x 1024, batch 1": (nn.Linear(1024, 1024), (1, 1024)),
        "linear 1024 x 1024, batch 64": (nn.Linear(1024, 1024), (64, 1024)),
        "conv 64 x 64 x 3 x 3, 32 images of 16 x 16": (nn.Conv2d(64, 64, 3, padding=1), (32, 64, 16, 16)),
        "ResNet-20, 32 images": (resnet20(), (32, 3, 32, 32)),
    }
    rows = []
    for title, (dense, shape) in layers.items():
        for density in (0.2, 0.1, 0.05):
            model = copy.deepcopy(dense).eval()
            sparsify(model, torch.optim.SGD(model.parameters(), lr=0.1), StaticMasks(density), steps=1)
            sparse, x = export(model, "csr"), torch.randn(shape)
            with torch.no_grad():
                seconds = (
                    best(lambda model=model, x=x: model(x), quick),
                    best(lambda m=sparse, x=x: m(x), quick),
                )
            found = {
                "what": title,
                "density": density,
                "dense_bytes": nbytes(model),
                "csr_bytes": nbytes(sparse),
            }
            rows.append(found | {"dense_ms": 1000 * seconds[0], "csr_ms": 1000 * seconds[1]})
            print(rows[-1], flush=True)
    if not quick:
        RUNS.put("forward", {"machine": machine(), "rows": rows})


def best(call: Callable[[], object], quick: bool) -> float:
    """The least seconds of processor time of a call, over many."""
    times = []
    for _ in range(3 if quick else 60):
        began = time.thread_time()
        call()
        times.append(time.thread_time() - began)
    return min(times)


def traffic(quick: bool) -> None:
    """Bytes that gradients put on real wires among four processes, as shares of DDP's own dense sum."""
    with tempfile.TemporaryDirectory() as folder:
        args = (Path(folder), 10 if quick else 200)
        torch.multiprocessing.spawn(traffic_rank, args, nprocs=WORKERS)
        found = json.loads((Path(folder) / "found.json").read_text())
    print(json.dumps(found, indent=1))
    if not quick:
        RUNS.put("traffic", found | {"machine": machine()})


def traffic_rank(rank: int, folder: Path, steps: int) -> None:
    """One of four processes: ResNet-20 at density 0.1 by RigL, on images that are noise."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORKERS)
    rows = []
    for spec in (
        "dense()",
        "masked(dense())",
        "masked(fp16())",
        "masked(cgx(bits=4))",
        "masked(topk(density=0.1))",
    ):
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(resnet20())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        sparse = sparsify(model, optimizer, "rigl(density=0.1, every=100)", steps=steps)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*sends each message")
            handle = compress(model, optimizer, spec)
        x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
        for _ in range(steps):
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(model(x), y))
            optimizer.step()
        stats, masks = handle.stats(), sparse.stats()
        dense = 4 * stats.steps * sum(each.numel() for each in model.parameters())
        rows.append(
            {
                "spec": spec,
                "density": masks.density,
                "gradients": stats.network_sent / stats.dense,
                "payload": stats.payload_sent / dense,
                "scores": masks.score_bytes / dense,
            }
        )
        handle.remove()
        sparse.remove()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps({"workers": WORKERS, "steps": steps, "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("train", *OTHERS), default="train")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="only these")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--width", type=int, default=1, help="so many times as many channels")
    other.add_argument("--times", type=int, default=1, help="trainings so many times as long")
    given = parser.parse_args()
    if min(given.width, given.times) < 1:
        parser.error(f"--width and --times are at least 1, got {min(given.width, given.times)}")
    torch.set_num_threads(1)
    if given.what == "train":
        train_all(given.seeds, given.quick, given.width, given.times)
    else:
        from benchmarks.rigl import recurrent  # it uses the results of this module

        calls = {
            "forward": forward,
            "traffic": traffic,
            "letters": recurrent.letters,
            "flops": recurrent.flops,
        }
        calls[given.what](given.quick)


if __name__ == "__main__":
    from benchmarks.rigl import __main__ as module  # started processes find functions under this name

    module.main()
