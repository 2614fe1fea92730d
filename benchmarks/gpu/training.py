"""Part training: ResNet-9 on CIFAR-10 by dense training and by methods, 4 ranks as threads on one GPU.

Ranks meet in a Loopback whose tensors are on the GPU, and exchange as `laconic.compress` and
`laconic.distribute` do. Methods run at the same time, each in a process; all have the same number of epochs,
chosen from the pace of the first steps. The learning rate is the same for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.job import Job, brief
from benchmarks.resnet9.model import Data, prepared, raw
from benchmarks.resnet9.rank import DECAY, PEAK, Rank
from laconic.comm.loopback import Loopback

ROOT = Path(__file__).parents[2]
RANKS, BATCH, MOST, LEAST = 4, 128, 18, 8  # epochs
PACE_STEPS = 12
MARGIN = 0.85  # of the time left is planned
SPECS = (  # the first three must reach LEAST epochs
    "dense()",
    "cgx(bits=4)",
    "dgc(density=0.01, warmup_steps=388)",
    "stc(density=0.01)",
    "sketchml(density=0.02)",
    "deft(density=0.01)",
    "oktopk(density=0.01)",
    "sgp()",
    "powersgd(rank=2)",
    "qsgd(levels=7)",
    "gather(sign())",
    "topk(density=0.01)",
)
Row = dict[str, Any]


def run(job: Job) -> None:
    """Start a process for each method, agree on the number of epochs, and collect their curves."""
    small = not job.cuda
    specs = SPECS[:3] if small else SPECS
    (job.out / "training").mkdir(exist_ok=True)
    try:
        images = raw(small)
    except Exception as error:
        job.fail("training", error)
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "images.pt"
        torch.save(images, path)
        run_all(job, specs, path)


def run_all(job: Job, specs: tuple[str, ...], path: Path) -> None:
    """Start a process for each method, and collect until the deadline."""
    job.note("setting", ranks=RANKS, batch=BATCH, peak_lr=PEAK, momentum="0.9 Nesterov", weight_decay=DECAY)
    processes = [start(job, spec, number, path) for number, spec in enumerate(specs)]
    try:
        collect(job, specs, processes)
    finally:
        for each in processes:
            each.kill()


def start(job: Job, spec: str, number: int, path: Path) -> subprocess.Popen[str]:
    """Start the process of one method; it writes a line of JSON at a time."""
    command = [sys.executable, "-m", __name__, spec, str(path), job.device.type]
    log = (job.out / "training" / f"{number}.log").open("w")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        bufsize=1,
    )


def collect(job: Job, specs: tuple[str, ...], processes: list[subprocess.Popen[str]]) -> None:
    """Read what the processes say: their pace, then an epoch at a time, until the deadline."""
    curves: dict[str, Row] = {spec: {"accuracy": [], "train_loss": []} for spec in specs}
    paces: dict[str, list[float]] = {}
    epochs: int | None = None
    buffers = ["" for _ in processes]
    for each in processes:
        assert each.stdout is not None
        os.set_blocking(each.stdout.fileno(), False)
    began = time.monotonic()
    while job.left() > 4 and any(each.poll() is None for each in processes):
        for number, (spec, each) in enumerate(zip(specs, processes, strict=True)):
            assert each.stdout is not None
            with contextlib.suppress(BlockingIOError, TypeError):
                buffers[number] += each.stdout.read() or ""
            *lines, buffers[number] = buffers[number].split("\n")
            for line in lines:
                take(json.loads(line), spec, curves, paces)
        ready = [spec for spec in specs if len(paces.get(spec, ())) > 1]  # the first includes set-up
        waited = time.monotonic() - began > 0.3 * job.seconds
        alive = sum(each.poll() is None for each in processes)
        if epochs is None and ready and (len(ready) >= alive or waited):
            latest = {spec: round(paces[spec][-1], 4) for spec in ready}
            epochs = planned(latest, job.left(), small=not job.cuda)
            job.note("epochs", epochs=epochs, pace_s=latest)
            for each in processes:
                with contextlib.suppress(OSError):
                    print(epochs, file=each.stdin, flush=True)
        time.sleep(0.05)
    for spec in specs:
        report(job, spec, curves[spec], epochs or 0)


def take(said: Row, spec: str, curves: dict[str, Row], paces: dict[str, list[float]]) -> None:
    """Store one line of a process."""
    curve = curves[spec]
    if "pace" in said:
        paces.setdefault(spec, []).append(said["pace"])
    elif "accuracy" in said:
        curve["accuracy"].append(said["accuracy"])
        curve["train_loss"].append(said["train_loss"])
    curve |= {key: said[key] for key in ("error", "smaller", "step_ms", "parameters") if key in said}


def planned(paces: dict[str, float], left: float, small: bool = False) -> int:
    """Return the number of epochs that every method can do in this time; at least 8.

    A method that is too slow for that does not hold the others up: its curve ends early.

    >>> planned({"dense()": 6.0, "cgx()": 10.0}, 200.0), planned({"dense()": 6.0, "slow()": 60.0}, 200.0)
    (17, 8)
    """
    if small:
        return 2
    affordable = int(MARGIN * left / max(paces.values()))
    return max(LEAST, min(MOST, affordable))


def report(job: Job, spec: str, curve: Row, epochs: int) -> None:
    """Store the curve of one method. The first three methods have to reach the end."""
    done = len(curve["accuracy"])
    figures = {"epochs": f"{done}/{epochs}", "accuracy": round(last(curve["accuracy"]), 2)}
    figures |= {key: curve[key] for key in ("smaller", "step_ms") if key in curve}
    row = {"figures": figures, **curve}
    if "error" in curve:
        job.note(spec, ok=False, **row)
    elif spec in SPECS[:3]:
        job.check(spec, 0 < epochs <= done, **row)
    else:
        job.note(spec, **row)


def last(accuracies: list[float]) -> float:
    """Return the mean of the last two epochs.

    >>> last([1.0, 2.0, 4.0]), last([])
    (3.0, 0.0)
    """
    return sum(accuracies[-2:]) / max(1, len(accuracies[-2:]))


def train(spec: str, images: Data, device: torch.device) -> None:
    """Train by one method in this process: say the pace, read the number of epochs, say the curve."""
    ranks = 2 if device.type == "cpu" else RANKS
    batch, width = (32, 8) if device.type == "cpu" else (BATCH, 64)
    steps = len(images["train_y"]) // (ranks * batch)

    def pace(comm: Loopback) -> None:
        rank = Rank(comm, spec, images, device, batch, width)
        count, told = min(PACE_STEPS, steps), torch.zeros(1)
        while not told:  # until all processes have a pace: so each is measured beside the others
            synchronise(device)
            began = time.perf_counter()
            for _ in range(count):
                rank.step(0, 10 * steps)
            synchronise(device)
            if comm.rank == 0:
                say(pace=(time.perf_counter() - began) / count * steps)
                told += len(select.select([sys.stdin], [], [], 0)[0])
            comm.broadcast(told)

    Loopback.run(ranks, pace, timeout_s=300.0)
    epochs = int(sys.stdin.readline())

    def trained(comm: Loopback) -> None:
        curve(Rank(comm, spec, images, device, batch, width), steps, epochs)

    Loopback.run(ranks, trained, timeout_s=300.0)


def curve(rank: Rank, steps: int, epochs: int) -> None:
    """Train for these epochs; rank 0 says the test accuracy after each."""
    began, total = time.perf_counter(), torch.zeros((), device=rank.device)
    for step in range(epochs * steps):
        total += rank.step(step, epochs * steps)
        if (step + 1) % steps == 0:
            accuracy = round(100 * rank.tested()[0] / len(rank.images["test_y"]), 2)
            if rank.comm.rank == 0:
                each = 1e3 * (time.perf_counter() - began) / (step + 1)
                loss = round(float(total) / steps, 4)
                say(
                    accuracy=accuracy, train_loss=loss, step_ms=round(each, 1), smaller=rank.smaller(step + 1)
                )
            total.zero_()


def synchronise(device: torch.device) -> None:
    """Wait for the GPU, if there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def say(**line: Any) -> None:
    """Write a line of JSON to the process that collects the curves."""
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    try:
        place = torch.device(sys.argv[3], 0) if sys.argv[3] == "cuda" else torch.device("cpu")
        stored = torch.load(sys.argv[2], weights_only=True)
        torch.backends.cudnn.benchmark = True
        train(sys.argv[1], prepared(stored, place), place)
    except Exception as error:
        say(error=brief(error))
        raise
