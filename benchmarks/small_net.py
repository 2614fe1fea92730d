"""A net whose step takes milliseconds, trained on CIFAR-10 by four workers that exchange as under DDP.

The workers are threads of one process. Feedback, codecs, reducers and rules are those of `laconic.compress`,
and bytes are counted as there; only DDP's buckets are missing: each step exchanges all gradients at once.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.ddp.optimiser import OptimiserHooks
from laconic.exchange.exchange import Exchange
from laconic.exchange.method import lift
from laconic.exchange.rule import Site
from laconic.tasks.cifar10 import inputs
from laconic.tasks.task import Recipe

WORKERS, BATCH, WARMUP, POINTS = 4, 16, 50, 40
Row = dict[str, Any]


def train(spec: str, lr: float, steps: int, seed: int, data: dict[str, Tensor]) -> Row:
    """Train, by the optimiser that the method needs: SGD with momentum 0.9 where it needs no other.

    The rate rises for WARMUP steps to `lr` and falls to 0 as a cosine. Workers of one seed begin with the
    same weights and draw the same batches, whatever the method. Of the result: `train_loss` is the mean of
    the last twentieth, `sent_mb` what a worker puts on the wire.

    Raises `NonFiniteError` where a training diverges.
    """
    began = time.process_time()
    row = Loopback.run(WORKERS, lambda comm: trained(comm, spec, lr, steps, seed, data), timeout_s=600.0)[0]
    taken = {"spec": spec, "steps": steps, "seed": seed, "workers": WORKERS, "batch": BATCH, "lr": lr}
    return taken | row | {"cpu_s": round(time.process_time() - began, 1)}


def net() -> nn.Module:
    """Three convolutions and two dense layers, 50,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(768, 40),
        nn.ReLU(),
        nn.Linear(40, 10),
    )


class Worker:
    """One of the workers: its model and optimiser, and what exchanges their gradients."""

    def __init__(self, comm: Loopback, spec: str, lr: float, seed: int) -> None:
        self.metered, self.model = Metered(comm.split(0)), in_turn(comm, seed)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.layout = Layout.of((name, tuple(p.shape)) for p, name in names.items())
        method = lift(parse(spec))
        self.optimizer = Recipe(net, lr, nesterov=False, weight_decay=0.0).optimizer(self.model, lr, method)
        hooks = OptimiserHooks(self.optimizer, names, lambda: self.exchange.step - 1, method.rules)
        self.exchange = Exchange(method, self.layout, self.metered, hooks, seed)
        site = Site(self.metered, seed, self.exchange.seconds)
        hooks.install([rule.bind(part, hooks, site) for rule, part in method.governed(self.layout)])
        self.bucket = torch.empty(self.layout.numel)
        self.metered.reset()

    def step(self, x: Tensor, y: Tensor) -> float:
        """One step with these examples; their loss."""
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        torch.cat([grad.flatten() for grad in grads], out=self.bucket)
        self.exchange.begin()
        self.exchange.mean_(self.bucket, self.layout)
        self.exchange.end()
        for grad, mean in zip(grads, self.layout.segments.views(self.bucket), strict=True):
            grad.copy_(mean.view(grad.shape))
        self.optimizer.step()
        return loss.item()


def in_turn(comm: Loopback, seed: int) -> nn.Module:
    """The same new model on every rank, made by one after the other, as they share torch's generator."""
    model: nn.Module
    for rank in range(comm.size):
        if rank == comm.rank:
            torch.manual_seed(seed)
            model = net()
        comm.all_reduce(torch.zeros(1))
    return model


def trained(comm: Loopback, spec: str, lr: float, steps: int, seed: int, data: dict[str, Tensor]) -> Row:
    """What comes of a training, on every rank."""
    worker = Worker(comm, spec, lr, seed)
    draws = torch.Generator().manual_seed(1000 * seed + comm.rank)
    losses = []
    for step in range(steps):
        risen, fallen = (step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps)
        worker.optimizer.param_groups[0]["lr"] = lr * min(1.0, risen) * fallen
        chosen = torch.randint(len(data["train_x"]), (BATCH,), generator=draws)
        losses.append(worker.step(inputs(data["train_x"][chosen], draws), data["train_y"][chosen].long()))
    part = slice(comm.rank, None, comm.size)
    hits, total = tested(worker.model, data["test_x"][part], data["test_y"][part].long())
    mean = comm.all_reduce(torch.tensor([hits, total, *losses], dtype=torch.float64))
    several, n = mean[2:] / comm.size, len(data["test_y"])
    every = max(1, steps // POINTS)
    curve = [(end, float(several[end - every : end].mean())) for end in range(every, steps + 1, every)]
    return {
        "accuracy": float(mean[0]) / n,
        "test_loss": float(mean[1]) / n,
        "train_loss": statistics.mean(several[-max(1, steps // 20) :].tolist()),
        "sent_mb": worker.metered.snapshot().network_sent / 1e6,
        "parameters": worker.layout.numel,
        "curve": [(step, round(loss, 5)) for step, loss in curve],
    }


@torch.no_grad()
def tested(model: nn.Module, x: Tensor, y: Tensor) -> tuple[int, float]:
    """How many of the images are told right, and the sum of their losses."""
    out = torch.cat([model(inputs(each, None)) for each in x.split(500)])
    return int((out.argmax(1) == y).sum()), float(F.cross_entropy(out, y, reduction="sum"))
