"""One rank of `benchmarks.straggler`, in its namespace: seconds for some steps, with or without sleep."""

from __future__ import annotations

import json
import random
import sys
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn

import laconic

WIDTH, DEPTH, BATCH = 1048, 10, 8  # 11 million parameters
WARM_UP = 3  # steps before the clock starts: DDP regroups its buckets after its first


def main(rank: int, size: int, store: str, case: str) -> None:
    """Play a case; a JSON line of figures on stdout."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    print(json.dumps(play(rank, size, **json.loads(case))))


def play(rank: int, size: int, spec: str, steps: int, sleep_s: float, share: float) -> dict[str, float]:
    """Seconds until this rank has done its steps, and until it has the group's model; bytes it has sent."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    plain = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model, optimizer = laconic.distribute(model, plain, spec)
    rng, x = random.Random(rank), torch.randn(BATCH, WIDTH)

    def step(sleepy: bool) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if sleepy and rank == size - 1 and rng.random() < share:
            time.sleep(sleep_s)
        optimizer.step()

    for _ in range(WARM_UP):
        step(sleepy=False)
    with optimizer.averaged():
        began, sent = time.monotonic(), optimizer.stats().wire_sent
    for _ in range(steps):
        step(sleepy=True)
    done = time.monotonic()
    sent = optimizer.stats().wire_sent - sent
    optimizer.finish()
    ended = time.monotonic()
    optimizer.remove()
    return {"steps_s": done - began, "finished_s": ended - began, "wire_mb": sent / 1e6}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
