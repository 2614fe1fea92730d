"""torchft's train_ddp.py, compressed: replicas that may die and come back, each started by a line of its own.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    REPLICA_GROUP_ID=0 torchrun --standalone examples/integrations/torchft_ddp.py
    REPLICA_GROUP_ID=1 torchrun --standalone examples/integrations/torchft_ddp.py

Stop one and start it again: it gets the model of the other, and goes on from there.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torchft import Manager, Optimizer, ProcessGroupGloo

from laconic.integrations import TorchftDDP

REPLICA = int(os.environ.get("REPLICA_GROUP_ID", 0))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This replica's examples of a step: inputs float32 (32, 64), classes int64 (32,)."""
    rng = torch.Generator().manual_seed(1000 * step + REPLICA)
    x = torch.randn(32, 64, generator=rng)
    return x, x[:, :10].argmax(1)


def main(steps: int, end: Path | None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"torchft_ddp_{REPLICA}",
        hostname="localhost",
    )
    model = TorchftDDP(manager, net, "topk(density=0.02)")  # the line: it was torchft's own
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=5e-3))

    while manager.current_step() < steps:
        x, y = batch(manager.current_step())
        optimizer.zero_grad()  # asks who is there
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()  # unless the step has failed somewhere

    if end is not None:
        torch.save(net.state_dict(), end)
    print(f"loss {loss.item():.3f}, {model.handle.stats().ratio:.0f} times less than dense")
    manager.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small net on replicas that come and go.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--end", type=Path, help="a file for the trained model")
    options = parser.parse_args()
    main(options.steps, options.end)
