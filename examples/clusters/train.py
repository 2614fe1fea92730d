"""Data-parallel training for clusters: each rank saves its own checkpoint, regularly and on SIGTERM.

    torchrun --nproc-per-node 2 examples/clusters/train.py --folder runs/clusters

It resumes from the newest complete checkpoint, on any number of ranks. docs/clusters.md shows how to start it
with SLURM, Kubernetes, Ray and on spot instances.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.tools.tasks import checkpoint

STOPPED = 75  # exit code of a run that saved and ended early; torchrun counts it as a failure and restarts
BATCH = 60  # examples per step on all ranks together, so that more ranks have fewer each


def train(folder: Path, *, steps: int = 2000, every: int = 100, spec: str = "dgc(density=0.02)") -> bool:
    """Train in the current process group. Return False if SIGTERM ended the run before its last step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sigterm = sigterm_event()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(net.to(device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = laconic.compress(model, optimizer, spec)

    first = 0
    saved = load(folder, rank, size)
    if saved is not None:
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["handle"])
        first = saved["step"]
        print(f"rank {rank} of {size} resumes after step {first}", flush=True)

    for done in range(first + 1, steps + 1):
        x, y = batch(done, rank, size)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        stop = on_any_rank(sigterm.is_set())
        if stop or done % every == 0 or done == steps:
            state = {"step": done, "model": net.state_dict(), "optimizer": optimizer.state_dict()}
            state["handle"] = handle.state_dict()
            checkpoint.save(folder, state, step=done, rank=rank, size=size, barrier=dist.barrier)
            if rank == 0:
                print(f"step {done}: loss {loss.item():.4f}, saved", flush=True)
        if stop and done < steps:
            return False
    if rank == 0:
        print(f"finished on {size} ranks, {handle.stats().ratio:.0f} times less than dense", flush=True)
    return True


def load(folder: Path, rank: int, size: int) -> dict[str, Any] | None:
    """Return this rank's part of the newest complete checkpoint, converted to `size` ranks, or None."""
    found = [checkpoint.latest(folder)]
    dist.broadcast_object_list(found)  # file servers may show a new file to one rank before another
    place = found[0]
    if place is None:
        return None
    old_size = json.loads((place / checkpoint.MARKER).read_text())["world_size"]
    if old_size == size:
        return checkpoint.load(place, rank=rank, size=size)
    parts = [checkpoint.load(place, rank=old, size=old_size) for old in range(old_size)]
    return {**parts[0], "handle": laconic.resize([part["handle"] for part in parts], size)[rank]}


def batch(step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return this rank's share of a step's examples: inputs float32 (n, 64), classes int64 (n,)."""
    x = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(step))
    share = x[rank::size].to(device())
    return share, share[:, :10].argmax(1)


def sigterm_event() -> threading.Event:
    """Return an event that SIGTERM sets; the step that is under way ends as usual."""
    event = threading.Event()
    if threading.current_thread() is threading.main_thread():  # Ray trains in another thread
        signal.signal(signal.SIGTERM, lambda *_: event.set())
    return event


def on_any_rank(value: bool) -> bool:
    """Return whether `value` is true on any rank, so that all ranks stop after the same step."""
    flag = torch.tensor(float(value), device=device())
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def device() -> torch.device:
    """Return this rank's GPU if there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small net on a cluster.")
    parser.add_argument("--folder", type=Path, default=Path("runs/clusters"), help="shared by all ranks")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--spec", default="dgc(density=0.02)", help="compression method")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, timeout=timedelta(minutes=5)
    )  # for a machine that vanishes: 30 by default
    finished = train(options.folder, steps=options.steps, every=options.every, spec=options.spec)
    dist.destroy_process_group()
    if not finished:
        raise SystemExit(STOPPED)


if __name__ == "__main__":
    main()
