"""One rank of `benchmarks.wan`: trains until rank 0 writes the last step in a file, and prints its record.

    python -m benchmarks.wan.rank FOLDER SPEC RATE STEPS SECONDS LOSS

Rank 0 ends the training when the mean of its last losses is at most LOSS, after STEPS steps, or after SECONDS
seconds; if the folder has a file `cut`, not before there is a file `up` and all ranks are back.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import laconic
from benchmarks.common.small_net import SMALL_GPT, load_windows
from laconic.exchange.method import Method
from laconic.strategies.distribute import strategy_or_method
from laconic.tools.lab.linux import interface_bytes

PATIENCE_S = 10.0
WARM_UP, SMOOTHED = 50, 25  # steps
APART, ALIKE = 100, 3  # most steps that a rank is ahead of another: with a strategy, with a method
END = "end"


def main(folder: Path, spec: str, rate: float, steps: int, most_s: float, target: float) -> None:
    """Train, and print a line of JSON."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rank, size, by = dist.get_rank(), dist.get_world_size(), strategy_or_method(spec)
    torch.manual_seed(0)
    plain = SMALL_GPT.build()
    patience = {} if isinstance(by, Method) else {"patience_s": PATIENCE_S}
    model, optimizer = laconic.distribute(plain, SMALL_GPT.optimizer(plain, rate, by), by, **patience)
    data, draws = load_windows(), torch.Generator().manual_seed(rank)
    steps_done: list[int] = []
    seconds: list[float] = []
    losses: list[float] = []
    sent: list[int] = []
    living = size
    dist.barrier()
    began, epoch, last = time.monotonic(), time.time(), None
    while (step := optimizer.stats().steps) != last:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARM_UP)
        chosen = torch.randint(len(data["train_x"]), (SMALL_GPT.batch,), generator=draws)
        loss = SMALL_GPT.loss(model, data["train_x"][chosen], data["train_y"][chosen], draws)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        steps_done.append(step)
        seconds.append(time.monotonic() - began)
        sent.append(interface_bytes("eth0")[0])
        if step == WARM_UP:
            (folder / f"begun{rank}").touch()
        if not isinstance(by, Method):
            living = len(optimizer.notes()["living"])
        if (folder / END).exists():
            last = last or int((folder / END).read_text())
        elif rank == 0 and (not (folder / "cut").exists() or ((folder / "up").exists() and living == size)):
            reached = step > WARM_UP and statistics.mean(losses[-SMOOTHED:]) <= target
            if reached or step >= steps or seconds[-1] >= most_s:
                last = optimizer.stats().steps + (ALIKE if isinstance(by, Method) else APART)
                (folder / "written").write_text(str(last))
                (folder / "written").rename(folder / END)
    optimizer.finish()
    flat = torch.cat([each.detach().flatten() for each in plain.parameters()])
    record = {
        "began": epoch,
        "steps": steps_done,
        "losses": [round(each, 4) for each in losses],
        "seconds": [round(each, 3) for each in seconds],
        "sent": sent,
        "model": hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
        "regroups": 0 if isinstance(by, Method) else optimizer.controller.membership.generation,
    }
    (folder / f"record{rank}.json").write_text(json.dumps(record))
    if rank == 0:  # it holds the store
        while len([*folder.glob("record*.json")]) < size:
            time.sleep(0.1)
        time.sleep(1)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), *map(float, sys.argv[5:]))
