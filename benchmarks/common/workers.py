"""Four workers, threads of one process, that train one model by any method or strategy: for many short runs.

Feedback, codecs, reducers, rules and strategies are those of `laconic.compress` and `laconic.distribute`, and
bytes are counted as there; only DDP's buckets are missing: a step exchanges all gradients at once.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.common.results import Row
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.ddp.optimiser import Optimisers
from laconic.exchange.attached import Attached
from laconic.exchange.method import Method
from laconic.strategies.distribute import strategy_or_method
from laconic.strategies.replica import Replica
from laconic.strategies.several import each_of
from laconic.strategies.strategy import Strategy

WORKERS, WARMUP, POINTS = 4, 50, 40
Data = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """Model, data and test of a training.

    `loss`: the mean over examples x, y that are drawn from train_x and train_y; its generator is for
    augmentation. `test`: of some of the test examples, the number told right, how many there were to tell,
    and the sum of their losses. `optimizer`: of a model at a rate, for a method or strategy.
    """

    build: Callable[[], nn.Module]
    batch: int
    loss: Callable[[nn.Module, Tensor, Tensor, torch.Generator], Tensor]
    test: Callable[[nn.Module, Tensor, Tensor], tuple[int, int, float]]
    optimizer: Callable[[nn.Module, float, Method | Strategy], Optimizer]


def train(problem: Problem, spec: str, lr: float, steps: int, seed: int, data: Data) -> Row:
    """Train, and test after the last step.

    The rate rises for WARMUP steps to `lr` and falls to 0 as a cosine. Workers of one seed begin with the
    same weights and draw the same batches, whatever the method. Of the result: `train_loss` is the mean of
    the last twentieth, `sent_mb` the MB that a worker sends.

    Raises `NonFiniteError` where a training diverges.
    """

    def alone(comm: Loopback) -> Row:
        return trained(comm, problem, spec, lr, steps, seed, data)

    began = time.process_time()
    row = Loopback.run(WORKERS, alone, timeout_s=600.0)[0]
    taken = {"spec": spec, "steps": steps, "seed": seed, "workers": WORKERS, "batch": problem.batch, "lr": lr}
    return taken | row | {"cpu_s": round(time.process_time() - began, 1)}


def in_turn(comm: Loopback, build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The same new model on every rank, made by one after the other, as they share torch's generator."""
    model: nn.Module
    for rank in range(comm.size):
        if rank == comm.rank:
            torch.manual_seed(seed)
            model = build()
        comm.all_reduce(torch.zeros(1))
    return model


class ByMethod:
    """Exchanges gradients, as `laconic.compress` does."""

    def __init__(
        self, method: Method, model: nn.Module, optimizer: Optimizer, comm: Metered, seed: int
    ) -> None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.model, self.optimizer = model, optimizer
        self.layout = Layout.of((name, tuple(p.shape)) for p, name in names.items())
        optimisers = Optimisers(each_of(optimizer), names, method.rules)
        self.exchange = Attached(method, self.layout, comm, optimisers, seed)
        self.bucket = torch.empty(self.layout.numel)

    def step(self, loss: float) -> None:
        """Exchange the gradients, and step."""
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        torch.cat([grad.flatten() for grad in grads], out=self.bucket)
        self.exchange.begin()
        self.exchange.mean_(self.bucket, self.layout)
        self.exchange.end()
        for grad, mean in zip(grads, self.layout.segments.views(self.bucket), strict=True):
            grad.copy_(mean.view(grad.shape))
        self.optimizer.step()

    def settle(self) -> None:
        """Leave the model that has been trained."""
        self.exchange.rules.close()


class ByStrategy:
    """Exchanges parameters, as `laconic.distribute` does."""

    def __init__(
        self, strategy: Strategy, model: nn.Module, optimizer: Optimizer, comm: Metered, seed: int
    ) -> None:
        self.replica, self.side, self.optimizer = Replica(model, optimizer), comm.split(0), optimizer
        self.replica.flatten()
        strategy.check(comm.size, optimizer)
        self.bound = strategy.bind(self.replica, optimizer, comm, seed)

    def step(self, loss: float) -> None:
        """Step, and exchange where the strategy does."""
        self.bound.step(self.optimizer.step, loss)

    def settle(self) -> None:
        """Leave the mean of the workers' models."""
        self.bound.drain(self.side)
        self.replica.flat.copy_(self.bound.consensus(self.side))
        self.bound.close()


class Worker:
    """One of the workers: its model and optimiser, and what holds it together with the others."""

    def __init__(self, comm: Loopback, problem: Problem, spec: str, lr: float, seed: int) -> None:
        self.problem, self.metered = problem, Metered(comm.split(0))
        self.model = in_turn(comm, problem.build, seed)
        by = strategy_or_method(spec)
        self.optimizer = problem.optimizer(self.model, lr, by)
        kind = ByStrategy if isinstance(by, Strategy) else ByMethod
        self.by = kind(by, self.model, self.optimizer, self.metered, seed)  # type: ignore[arg-type]
        self.metered.reset()

    def step(self, x: Tensor, y: Tensor, draws: torch.Generator) -> float:
        """One step with these examples; their loss."""
        loss = self.problem.loss(self.model, x, y, draws)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.by.step(loss.item())
        return loss.item()


def trained(comm: Loopback, problem: Problem, spec: str, lr: float, steps: int, seed: int, data: Data) -> Row:
    """Train, and return the row, which is the same on every rank."""
    worker = Worker(comm, problem, spec, lr, seed)
    draws = torch.Generator().manual_seed(1000 * seed + comm.rank)
    losses = []
    for step in range(steps):
        risen, fallen = (step + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * step / steps)
        for group in worker.optimizer.param_groups:
            group["lr"] = lr * min(1.0, risen) * fallen
        chosen = torch.randint(len(data["train_x"]), (problem.batch,), generator=draws)
        losses.append(worker.step(data["train_x"][chosen], data["train_y"][chosen], draws))
    sent = worker.metered.snapshot().network_sent
    worker.by.settle()
    part = slice(comm.rank, None, comm.size)
    with torch.no_grad():
        tested = problem.test(worker.model, data["test_x"][part], data["test_y"][part])
    mean = comm.all_reduce(torch.tensor([*tested, *losses], dtype=torch.float64))
    (hits, n, total), several = mean[:3].tolist(), mean[3:] / comm.size
    every = max(1, steps // POINTS)
    curve = [(end, float(several[end - every : end].mean())) for end in range(every, steps + 1, every)]
    return {
        "accuracy": hits / n,
        "test_loss": total / n,
        "train_loss": statistics.mean(several[-max(1, steps // 20) :].tolist()),
        "sent_mb": sent / 1e6,
        "parameters": sum(parameter.numel() for parameter in worker.model.parameters()),
        "curve": [(step, round(loss, 5)) for step, loss in curve],
    }
