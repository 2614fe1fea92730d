"""One rank of `benchmarks.wan`: trains until rank 0 writes the last step in a file, and writes its record.

    python -m benchmarks.wan.rank FOLDER SPEC RATE STEPS SECONDS LOSS

Rank 0 ends the training when the mean of its last losses is at most LOSS, after STEPS steps, or after SECONDS
seconds; if the folder has a file `cut`, not before there is a file `up` and all ranks are back, or the others
have had REJOIN_S seconds to come back.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import time
import warnings
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import laconic
from benchmarks.common.small_net import SMALL_GPT, load_windows
from laconic.comm.torch_comm import TorchComm
from laconic.exchange.method import Method
from laconic.strategies.distribute import strategy_or_method
from laconic.tools.lab.linux import interface_bytes
from laconic.tools.lab.wiring import INTERFACE
from laconic.tools.plan.probe import probe_network

PATIENCE_S, REJOIN_S = 30.0, 120.0  # a rank may wait for one that is some rounds behind
WARM_UP, SMOOTHED = 50, 50  # steps
AHEAD_BY_STRATEGY, AHEAD_BY_METHOD = 100, 3  # most steps that one rank is ahead of another
END = "end"


def main(folder: Path, spec: str, rate: float, steps: int, most_s: float, target: float) -> None:
    """Train, and write a record."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rank, size, by = dist.get_rank(), dist.get_world_size(), strategy_or_method(spec)
    network = asdict(probe_network(TorchComm())) if isinstance(by, Method) else None
    torch.manual_seed(0)
    plain = SMALL_GPT.build()
    patience = {} if isinstance(by, Method) else {"patience_s": PATIENCE_S}
    model, optimizer = laconic.distribute(plain, SMALL_GPT.optimizer(plain, rate, by), by, **patience)
    data, draws = load_windows(), torch.Generator().manual_seed(rank)
    done: list[tuple[int, float, float, int]] = []  # step, loss, seconds, bytes sent
    may_end, living, last = not (folder / "cut").exists(), size, sys.maxsize
    dist.barrier()
    sent, began, epoch = interface_bytes(INTERFACE)[0], time.monotonic(), time.time()
    while (step := optimizer.stats().steps) < last:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARM_UP)
        chosen = torch.randint(len(data["train_x"]), (SMALL_GPT.batch,), generator=draws)
        loss = SMALL_GPT.loss(model, data["train_x"][chosen], data["train_y"][chosen], draws)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds = time.monotonic() - began
        done.append((step, round(loss.item(), 4), round(seconds, 3), interface_bytes(INTERFACE)[0] - sent))
        if step >= WARM_UP:
            (folder / f"begun{rank}").touch()
        if not isinstance(by, Method):
            living = len(optimizer.notes()["living"])
        if last == sys.maxsize and (folder / END).exists():
            last = int((folder / END).read_text())
        elif rank == 0 and last == sys.maxsize:
            may_end = may_end or returned(folder / "up", living == size)
            losses = [each[1] for each in done[-SMOOTHED:]]
            reached = step > WARM_UP + SMOOTHED and statistics.mean(losses) <= target
            if may_end and (reached or step >= steps or seconds >= most_s):
                last = step + 1 + (AHEAD_BY_METHOD if isinstance(by, Method) else AHEAD_BY_STRATEGY)
                (folder / "written").write_text(str(last))
                (folder / "written").rename(folder / END)
    optimizer.finish()
    flat = torch.cat([each.detach().flatten() for each in plain.parameters()])
    record = {
        "began": epoch,
        "done": done,
        "model": hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
        "regroups": 0 if isinstance(by, Method) else optimizer.controller.membership.generation,
        "network": network,
    }
    partial = folder / f"partial{rank}"
    partial.write_text(json.dumps(record))
    partial.rename(folder / f"record{rank}.json")
    deadline = time.monotonic() + REJOIN_S
    while rank == 0 and len([*folder.glob("record*.json")]) < size and time.monotonic() < deadline:
        time.sleep(0.1)  # it holds the store
    time.sleep(1)
    os._exit(0)


def returned(up: Path, all_live: bool) -> bool:
    """Return whether the link is up again and all ranks are back, or have had time to come back."""
    return up.exists() and (all_live or time.time() - up.stat().st_mtime > REJOIN_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), *map(float, sys.argv[5:]))
