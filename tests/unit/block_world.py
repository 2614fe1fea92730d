"""A small task whose model is cut into blocks, on ranks that are threads."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from laconic.admm import BlockTrainer
from laconic.comm.comm import Comm
from laconic.comm.loopback import Loopback

SAMPLES, ROWS, WIDE = 64, 16, 32
ONE_AT_A_TIME = threading.Lock()  # threads share torch's generator


def data() -> tuple[Tensor, Tensor]:
    """Inputs (64, 16), and which of the first four entries is the largest."""
    x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(0))
    return x, x[:, :4].argmax(1)


def net(*between: nn.Module) -> nn.Sequential:
    """Three dense layers with these layers between them, by default ReLU."""
    first, second = between or (nn.ReLU(), nn.ReLU())
    with ONE_AT_A_TIME:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, WIDE), first, nn.Linear(WIDE, WIDE), second, nn.Linear(WIDE, 4))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def ids_of(step: int) -> Tensor:
    """The ids of a mini-batch: shuffled anew in each epoch."""
    steps = SAMPLES // ROWS
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step // steps))
    return order[step % steps * ROWS :][:ROWS]


def trainer(comm: Comm, spec: str, make: Any = adam, model: nn.Module | None = None, **options: Any) -> Any:
    """This rank's trainer, with one id a sample in mode 'batch'."""
    if "mode='batch'" in spec:
        options = {"samples": SAMPLES} | options
    example = data()[0][:2]
    return BlockTrainer(model or net(), spec, example=example, optimizer=make, comm=comm, **options)


def stepped(made: Any, step: int) -> float | None:
    x, y = data()
    ids = ids_of(step)
    found: float | None = made.step(x[ids], y[ids], ids if made.samples else None)
    return found


def trained(spec: str, steps: int, between: Any = tuple, size: int = 3, **options: Any) -> list[Any]:
    """(losses, stats, all parameters and buffers, the model) of each rank after some steps."""

    def rank(comm: Comm) -> Any:
        made = trainer(comm, spec, model=net(*between()), **options)
        losses = [stepped(made, step) for step in range(steps)]
        losses = [loss for loss in losses if loss is not None] + made.finish()
        model = made.gather()
        made.close()
        return losses, made.stats(), flat(model), model

    return Loopback.run(size, rank)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten().float() for each in (*model.parameters(), *model.buffers())])
