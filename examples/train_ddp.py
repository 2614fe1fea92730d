"""A plain data-parallel script with one line added. Run it on two workers of this machine:

    laconic run --nproc-per-node 2 --max-restarts 2 examples/train_ddp.py --spec "dgc(density=0.01)"

Every worker writes its part of a checkpoint each --every steps. When one dies, all are started anew (elastic
restarts), and go on from the last checkpoint that every worker has finished.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.tools.tasks import checkpoint
from laconic.tools.tasks.digits import inputs, load, small_cnn
from laconic.tools.tasks.shard import Shard


def main() -> None:
    options = arguments()
    torch.manual_seed(options.seed)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    data = load()
    model = DistributedDataParallel(small_cnn())
    optimizer = torch.optim.SGD(
        model.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    handle = laconic.compress(model, optimizer, options.spec, seed=options.seed)  # the line
    shard = Shard(len(data["train_y"]), options.batch, rank, size, options.seed)

    first = 0
    place = checkpoint.latest(options.checkpoints)
    if place is not None:
        state = checkpoint.load(place, rank=rank, size=size)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        handle.load_state_dict(state["handle"])
        first = state["step"]
        print(f"rank {rank}: goes on after step {first}", flush=True)

    for step in range(first, options.steps):
        chosen = shard.indices(step)
        loss = cross_entropy(model(inputs(data["train_x"][chosen], None)), data["train_y"][chosen].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        done = step + 1
        if rank == 0 and done % 10 == 0:
            print(f"step {done}: loss {loss.item():.4f}", flush=True)
        if done % options.every == 0:
            state = {
                "step": done,
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "handle": handle.state_dict(),
            }
            checkpoint.save(options.checkpoints, state, step=done, rank=rank, size=size, barrier=dist.barrier)

    if rank == 0:
        torch.save(model.module.state_dict(), options.out)
        stats = handle.stats()
        print(f"sent {stats.network_sent / 1e6:.2f} MB, {stats.ratio:.0f} times less than dense")
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train digits on several workers.")
    parser.add_argument("--spec", default="dgc(density=0.01)", help="how gradients travel")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="examples a worker and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("runs/train_ddp"), help="a folder all workers share"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/train_ddp.pt"), help="the trained model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
