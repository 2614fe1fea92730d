"""One rank of `benchmarks.straggler`, on its host: seconds and bytes of a training, with or without sleep."""

from __future__ import annotations

import json
import os
import random
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import laconic
from laconic.strategies.distributed_optimizer import DistributedOptimizer
from laconic.tools.lab.linux import interface_bytes

DEPTH, BATCH, KINDS, NOISE = 10, 8, 10, 2.0
WARM_UP = 3  # steps before the clock starts: DDP regroups its buckets after its first
SETTLE_S = 0.3  # the last acknowledgements may be late


class Training:
    """`DEPTH` square layers that tell `KINDS` clouds of points apart; 11 million parameters at width 1048."""

    def __init__(self, spec: str, width: int, lr: float) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(width, width) for _ in range(DEPTH)]
        for layer in layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        model: nn.Module = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))[:-1]
        self.centres = torch.randn(KINDS, width)
        self.held_out = self.examples(256, torch.Generator().manual_seed(1))
        self.rng = torch.Generator().manual_seed(100 + dist.get_rank())
        plain = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.model: nn.Module
        self.optimizer: DistributedOptimizer
        self.model, self.optimizer = laconic.distribute(model, plain, spec)

    def examples(self, count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        kinds = torch.randint(KINDS, (count,), generator=rng)
        noise = torch.randn(count, self.centres.shape[1], generator=rng)
        return self.centres[kinds] + NOISE * noise, kinds

    def step(self, asleep_s: float = 0.0) -> None:
        x, y = self.examples(BATCH, self.rng)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        time.sleep(asleep_s)
        self.optimizer.step()

    def loss(self) -> float:
        """Of the group's model on examples that nobody trains on."""
        with self.optimizer.averaged(), torch.no_grad():
            x, y = self.held_out
            return F.cross_entropy(self.model(x), y).item()


def asleep(spec: str, width: int, lr: float, steps: int, sleep_s: float, share: float) -> dict[str, float]:
    """Seconds until this rank has done its steps, and megabytes that its interface has sent for them."""
    training, rng = Training(spec, width, lr), random.Random(0)
    last = dist.get_rank() == dist.get_world_size() - 1
    for _ in range(WARM_UP):
        training.step()
    training.loss()  # all begin together
    began, sent = time.monotonic(), interface_bytes("eth0")[0]
    for _ in range(steps):
        training.step(sleep_s if last and rng.random() < share else 0.0)
    done, sent = time.monotonic(), interface_bytes("eth0")[0] - sent
    training.optimizer.finish()
    training.optimizer.remove()
    return {"steps_s": done - began, "finished_s": time.monotonic() - began, "sent_mb": sent / 1e6}


def to_loss(
    spec: str, width: int, lr: float, steps: int, look_every: int, target: float | None
) -> dict[str, Any]:
    """Train until the group's held-out loss is at most `target`, or for `steps` steps.

    Looks at the loss every `look_every` steps; what looking costs is not counted.
    """
    training = Training(spec, width, lr)
    losses, counted, seconds, done = [], 0, 0.0, 0
    while done < steps and (target is None or not losses or losses[-1] > target):
        dist.barrier()
        time.sleep(SETTLE_S)
        sent, began = interface_bytes("eth0")[0], time.monotonic()
        for _ in range(min(look_every, steps - done)):
            training.step()
            done += 1
        seconds += time.monotonic() - began
        time.sleep(SETTLE_S)
        counted += interface_bytes("eth0")[0] - sent
        losses.append(training.loss())
    training.optimizer.remove()
    return {"steps": done, "seconds": seconds, "sent_mb": counted / 1e6, "losses": losses}


def main(what: str, case: dict[str, Any]) -> None:
    """Play a case; a JSON line of figures on stdout."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    print(json.dumps({"asleep": asleep, "to_loss": to_loss}[what](**case)), flush=True)
    os._exit(0)  # a strategy's threads may wait for a rank that has gone


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
