"""The part `loss` of `benchmarks.pipeline`: a small GPT in two stages, over and over a fixed set.

Each training is `laconic train shakespeare --stages 2` with one method and one seed, on two hosts of a lab.
Its learning curve by steps and by seconds, its test loss and its bytes are stored as a row.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection
from itertools import accumulate
from pathlib import Path

from benchmarks.common.machine import machine
from benchmarks.common.results import Results, Row
from benchmarks.pipeline.workloads import CROSSINGS, OURS
from laconic.tools.report.ledger import EVENTS, slug

LINK = "10mbit"
MODEL, STAGES, EXAMPLES, BATCH, EPOCHS, SEEDS = "gpt", 2, 256, 16, 12, 3
STEPS = EXAMPLES // BATCH * EPOCHS  # 192: dense sends 1 MB a step, so some 3 minutes on a quiet machine
WAYS = {name: spec for name, spec in CROSSINGS.items() if spec != OURS}  # which trains as dense, bit for bit
POINTS = 50


def measure(runs: Results, quick: bool, only: Collection[str] = (), seeds: int = SEEDS) -> None:
    """All trainings that are not kept yet; every way with one seed before the next seed."""
    for seed in range(1 if quick else seeds):
        for name, spec in WAYS.items():
            if only and name not in only:
                continue
            key = f"loss/{slug(spec)}-{seed}"
            if quick and name not in ("dense", "AC-SGD 4/8"):
                continue
            if key in runs and not quick:
                continue
            row = train(spec, seed, steps=4 if quick else STEPS)
            print(
                f"loss  seed {seed}  {name:10}  train {row['train_loss']:.4f}  test {row['test_loss']:.4f}"
                f"  {row['seconds'][-1]:.0f} s  {row['sent_mb']:.1f} MB",
                flush=True,
            )
            if not quick:
                runs.put(key, row)


def train(spec: str, seed: int, steps: int) -> Row:
    """One training in a lab of two hosts, by the command line."""
    with tempfile.TemporaryDirectory() as folder:
        train = ["train", "shakespeare", "--model", MODEL, "--stages", str(STAGES), "--with", spec]
        train += [
            "--examples",
            str(EXAMPLES),
            "--batch",
            str(BATCH),
            "--steps",
            str(steps),
            "--eval-every",
            "0",
        ]
        train += ["--seed", str(seed), "--out", folder, "--name", "run"]
        laconic = [sys.executable, "-m", "laconic.tools.cli"]
        lab = [*laconic, "lab", "--hosts", str(STAGES), "--link", LINK, "--once", "--"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*lab, *laconic, *train], check=True, env=environment, stdout=subprocess.DEVNULL)
        events = [json.loads(text) for text in (Path(folder) / "run" / EVENTS).read_text().splitlines()]
    return summary(spec, seed, steps, events)


def summary(spec: str, seed: int, steps: int, events: list[Row]) -> Row:
    """What is kept: the loss of each window of steps, and seconds until its end by the slower stage."""
    done = [event for event in events if event["kind"] == "step"]
    losses = {event["step"]: event["loss"] for event in done if event["loss"] is not None}
    slowest: dict[int, float] = {}
    for event in done:
        slowest[event["step"]] = max(slowest.get(event["step"], 0.0), event["step_s"])
    clock = list(accumulate(slowest[step] for step in range(1, steps + 1)))
    wide = max(1, steps // POINTS)
    ends = range(wide, steps + 1, wide)
    tests = [event for event in events if event["kind"] == "eval"]
    means = [statistics.mean(losses[i] for i in range(end - wide + 1, end + 1)) for end in ends]
    last = EXAMPLES // BATCH  # an epoch
    return {
        "spec": spec,
        "seed": seed,
        "steps": [*ends],
        "seconds": [round(clock[end - 1], 3) for end in ends],
        "loss": [round(mean, 5) for mean in means],
        "train_loss": statistics.mean(losses[i] for i in range(max(1, steps - last + 1), steps + 1)),
        "test_loss": sum(event["loss_sum"] for event in tests) / sum(event["answers"] for event in tests),
        "step_s": statistics.median(slowest.values()),
        "sent_mb": sum(event["network_sent"] for event in done) / 1e6,
        "settings": {"model": MODEL, "examples": EXAMPLES, "batch": BATCH, "stages": STAGES, "link": LINK},
        "machine": machine(),
    }
