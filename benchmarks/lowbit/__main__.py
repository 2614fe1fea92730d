"""Accuracy of nets that train with few bits, beside float32, and of their packed forms.

    python -m benchmarks.lowbit mnist      an MLP of 3 x 1024, each training that is not stored yet
    python -m benchmarks.lowbit cifar10    a small convolutional net
    python -m benchmarks.lowbit shakespeare    an LSTM
    python -m benchmarks.lowbit mnist --seeds 1    of this seed alone; another process can do the others
    meanwhile
    python -m benchmarks.lowbit mnist --quick      a few steps of each, in a temporary folder

A run is a function of its seed: the first weights and the batches do not depend on the bits. One thread.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.machine import machine
from benchmarks.common.results import Results
from laconic.lowbit import binarise, pack, quantise, save_packed
from laconic.tools.tasks import find
from laconic.tools.tasks.task import Tensors, cross_entropy, right_answers

RUNS = Results(Path(__file__).with_name("results.jsonl"))
SEEDS, BATCH, LR, LAST = 3, 100, 3e-3, 0.003  # the rate falls exponentially to LAST of the first
EPOCHS = {"mnist": 10, "cifar10": 4}
TEST_BATCH = 500
METHODS = {
    "float": None,
    "binarise()": lambda model: binarise(model),
    "quantise(weights=1, activations=2)": lambda model: quantise(model, 1, 2, None),
    "quantise(weights=1, activations=2, gradients=6)": lambda model: quantise(model, 1, 2, 6),
}
RUN = {"mnist": ("binarise()", "float"), "cifar10": tuple(METHODS)}


@dataclass(frozen=True)
class Trial:
    """One training."""

    task: str
    method: str
    seed: int

    @property
    def key(self) -> str:
        plain = "".join(letter if letter.isalnum() else "_" for letter in self.method).strip("_")
        return f"{self.task}-{plain}-{self.seed}"


def trials(task: str, seeds: Sequence[int]) -> Iterator[Trial]:
    """All of a task with these seeds: those of a seed before the next seed."""
    for seed in seeds:
        for method in RUN[task]:
            yield Trial(task, method, seed)


def mlp(act: Any) -> nn.Module:
    """784 to three layers of 1,024 with batch norm, to 10."""
    layers, inside = list[nn.Module]([nn.Flatten()]), 784
    for _ in range(3):
        layers += [nn.Linear(inside, 1024, bias=False), nn.BatchNorm1d(1024), act()]
        inside = 1024
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def convolutions(act: Any) -> nn.Module:
    """Four convolutions at 32, 64 and 128 channels with batch norm, and two dense layers: 0.7 million
    parameters.
    """
    layers, inside = list[nn.Module](), 3
    for outside, pool in ((32, True), (64, True), (64, True), (128, False)):
        layers.append(nn.Conv2d(inside, outside, 3, padding=1, bias=False))
        layers += [nn.MaxPool2d(2)] if pool else []
        layers += [nn.BatchNorm2d(outside), act()]
        inside = outside
    layers += [nn.Flatten(), nn.Linear(2048, 256, bias=False), nn.BatchNorm1d(256), act(), nn.Linear(256, 10)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


NETS = {"mnist": mlp, "cifar10": convolutions}


def train(trial: Trial, tensors: Tensors, epochs: int, examples: int, tested: int) -> dict[str, Any]:
    """One training, and what is kept of it."""
    torch.set_num_threads(1)
    torch.manual_seed(trial.seed)
    task, attach = find(trial.task), METHODS[trial.method]
    model = NETS[trial.task](nn.ReLU if attach is None else nn.Identity)
    handle = None if attach is None else attach(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    rng = torch.Generator().manual_seed(trial.seed)
    steps, done, curve = epochs * (examples // BATCH), 0, []
    began = time.process_time()
    for epoch in range(epochs):
        for chosen in torch.randperm(examples, generator=rng).split(BATCH):
            for group in optimizer.param_groups:
                group["lr"] = LR * LAST ** (done / steps)
            x = task.inputs(tensors["train_x"][chosen], rng)
            loss = cross_entropy(model(x), tensors["train_y"][chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
        flips = None if handle is None else round(handle.flips(), 5)
        curve.append((epoch + 1, round(loss.item(), 4), flips))
        print(f"{trial} epoch {epoch + 1}: loss {loss.item():.4f}, flips {flips}", flush=True)
    spent = time.process_time() - began
    logits = outputs(model, task, tensors, tested)
    row = {
        "task": trial.task,
        "method": trial.method,
        "seed": trial.seed,
        "epochs": epochs,
        "batch": BATCH,
        "lr": LR,
        "error": 1 - right_answers(logits, tensors["test_y"][:tested]) / tested,
        "curve": curve,
        "cpu_s": round(spent, 1),
    }
    return (
        row
        | ({} if handle is None else packed(model, task, tensors, logits, tested))
        | {"machine": machine()}
    )


def outputs(model: nn.Module, task: Any, tensors: Tensors, tested: int) -> Tensor:
    """Logits of the test images."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(task.inputs(x, None)) for x in tensors["test_x"][:tested].split(TEST_BATCH)])


def packed(model: nn.Module, task: Any, tensors: Tensors, logits: Tensor, tested: int) -> dict[str, Any]:
    """The packed model's error and size, and whether its outputs are the same bits."""
    small = pack(model)
    own = outputs(small, task, tensors, tested)
    plain = sum(part.nbytes for part in [*model.parameters(), *model.buffers()])
    with tempfile.NamedTemporaryFile() as file:
        save_packed(small, file.name)
        on_disk = Path(file.name).stat().st_size
    return {
        "packed_error": 1 - right_answers(own, tensors["test_y"][:tested]) / tested,
        "same_bits": bool(torch.equal(own, logits)),
        "bytes": plain,
        "packed_bytes": sum(part.nbytes for part in small.state_dict().values()),
        "packed_file": on_disk,
    }


def main() -> None:
    """Train what is not stored yet."""
    options = argparse.ArgumentParser(prog="benchmarks.lowbit")
    options.add_argument("task", choices=(*NETS, "shakespeare"))
    options.add_argument("--quick", action="store_true", help="a few steps of each, in a temporary folder")
    options.add_argument("--seeds", type=int, nargs="+", default=range(SEEDS), help="these alone")
    given = options.parse_args()
    if given.task == "shakespeare":
        from benchmarks.lowbit.recurrent import shakespeare  # it uses the results of this module

        shakespeare(given.seeds, given.quick)
        return
    tensors = find(given.task).load(None)
    examples, epochs, tested = len(tensors["train_y"]), EPOCHS[given.task], len(tensors["test_y"])
    if given.quick:
        examples, epochs, tested = 300, 1, 500
    with tempfile.TemporaryDirectory() as scratch:
        runs = Results(Path(scratch) / "results.jsonl") if given.quick else RUNS
        for trial in trials(given.task, given.seeds):
            if trial.key not in runs:
                row = train(trial, tensors, epochs, examples, tested)
                runs.put(trial.key, row)
                print(
                    json.dumps({name: row[name] for name in row if name not in ("machine", "curve")}),
                    flush=True,
                )


if __name__ == "__main__":
    main()
