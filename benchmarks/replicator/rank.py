"""One rank of `benchmarks.replicator`: trains until so many gradients have been applied, or serves."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import laconic

BATCH, KINDS, NOISE, LR = 32, 10, 6.0, 0.02


def main(folder: Path, case: dict[str, Any]) -> None:
    """Write what this worker has measured to a file of its own."""
    torch.set_num_threads(1)

    def replica(replicator: laconic.Replicator) -> None:
        told = train(replicator, folder, **case)
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(told))

    laconic.Replicator(case["spec"]).launch(replica)


def train(
    replicator: laconic.Replicator,
    folder: Path,
    spec: str,
    sleep_s: float,
    repeat: int,
    gradients: int,
    width: int,
    share: float,
) -> dict[str, Any]:
    """Seconds, staleness, and the loss on examples that nobody trains on."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, KINDS)
    )
    centres = torch.randn(KINDS, width)
    optimizer = replicator.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=LR))
    number = replicator.group * replicator.replicas + replicator.replica
    last = number == replicator.groups * replicator.replicas - 1
    dice, rng = random.Random(repeat), torch.Generator().manual_seed(100 * repeat + number)

    def examples(count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        kinds = torch.randint(KINDS, (count,), generator=rng)
        return centres[kinds] + NOISE * torch.randn(count, width, generator=rng), kinds

    def step(batch: tuple[Tensor, Tensor]) -> None:
        if last and dice.random() < share:
            time.sleep(sleep_s)
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    batches = replicator.make_input(lambda context: iter(lambda: examples(BATCH, rng), None))
    cross_entropy(model(examples(BATCH, rng)[0]), torch.zeros(BATCH, dtype=torch.int64)).backward()
    together(folder, replicator.groups * replicator.replicas)
    began, steps = time.monotonic(), 0  # the same clock in all processes of a machine
    while optimizer.updates * replicator.replicas < gradients:
        replicator.run(step, batches, steps=1)
        steps += 1
    done, stats = time.monotonic(), optimizer.stats()
    x, y = examples(1024, torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = cross_entropy(model(x), y).item()
    return {
        "began": began,
        "done": done,
        "steps": steps,
        "loss": loss,
        "staleness": stats.staleness,
        "refused": stats.refused,
        "sharing": replicator.replicas,
    }


def together(folder: Path, workers: int) -> None:
    """Wait until all workers are here: they meet in a folder, as nothing in `async` lets them."""
    (folder / f"{os.environ['RANK']}.here").touch()
    while len(list(folder.glob("*.here"))) < workers:
        time.sleep(0.005)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
