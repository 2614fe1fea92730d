"""A plain DistributedDataParallel script under torchrun, compressed, with checkpoints by which it resumes.

    torchrun --nproc-per-node 2 examples/integrations/torchrun_ddp.py --folder runs/ddp --steps 40
    torchrun --nproc-per-node 2 examples/integrations/torchrun_ddp.py --folder runs/ddp --steps 80

Rank 0 writes one file, with what each rank has not sent yet; the second line goes on from it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import laconic


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's examples of a step: inputs float32 (32, 64), classes int64 (32,)."""
    rng = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 64, generator=rng)
    return x, x[:, :10].argmax(1)


def main(folder: Path, steps: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = laconic.compress(model, optimizer, "dgc(density=0.02)")  # the line

    first, path = 0, folder / "last.pt"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["handle"])
        first = saved["step"]
    dist.barrier()  # none writes while another reads

    for step in range(first, steps):
        x, y = batch(step, rank)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    kept = handle.state_dict(gather=True)  # on rank 0, that of all
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        state = {"step": steps, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "handle": dict(kept)}, path)
        print(f"loss {loss.item():.3f}, {handle.stats().ratio:.0f} times less than dense")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small net on several workers.")
    parser.add_argument("--folder", type=Path, default=Path("runs/torchrun_ddp"), help="of the checkpoint")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    main(options.folder, options.steps)
