"""Small models and training loops that run in worker processes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.ddp.handle import Handle
from laconic.strategies.distribute import strategy_or_method
from laconic.strategies.strategy import Strategy
from laconic.tools.tasks import shakespeare

SGD = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}


def momentum_for(spec: Any) -> float:
    """The momentum of an SGD that suits this strategy or method: none where the strategy has its own."""
    found = strategy_or_method(spec)
    return 0.0 if isinstance(found, Strategy) and found.owns_momentum else 0.9


def compress_anyway(model: Any, optimizer: torch.optim.Optimizer, spec: Any, **options: Any) -> Handle:
    """`laconic.compress` without the warning that a gather sends more than dense would."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*sends each message")
        return laconic.compress(model, optimizer, spec, **options)


def net(seed: int = 0, width: int = 64, depth: int = 3) -> nn.Sequential:
    """A small network with matrices and vectors, equal for equal seeds."""
    torch.manual_seed(seed)
    hidden = [
        layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU())
    ]
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), *hidden, nn.Linear(width, 5))


class GPT(shakespeare.GPT):
    """The language model of the task, smaller; its output is no view: of these fully_shard warns."""

    def __init__(self) -> None:
        super().__init__(width=32, depth=2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clone()


def text(rank: int, step: int, size: int = 8, length: int = 16, vocabulary: int = 12) -> Tensor:
    """Tokens int64 (size, length + 1) of a rank and step: counting by a step of 1 to 3, with slips."""
    rng = torch.Generator().manual_seed(7919 * step + rank)
    start = torch.randint(vocabulary, (size, 1), generator=rng)
    stride = torch.randint(1, 4, (size, 1), generator=rng)
    slips = torch.randint(vocabulary, (size, length + 1), generator=rng)
    slip = torch.rand(size, length + 1, generator=rng) < 0.1
    return torch.where(slip, slips, (start + stride * torch.arange(length + 1)) % vocabulary)


def batch(rank: int, step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Inputs and labels of one rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 20, generator=generator)
    return x, (x[:, :5].argmax(dim=1) + (x[:, 5] > 0).long()) % 5


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss of this rank's batch."""
    x, y = batch(dist.get_rank(), step)
    return nn.functional.cross_entropy(model(x), y)


def flat(model: nn.Module) -> Tensor:
    """All parameters in one tensor."""
    return torch.cat([parameter.detach().flatten().float() for parameter in model.parameters()])


def agree(model: nn.Module) -> bool:
    """Whether all ranks have the same parameters, bit for bit, and finite ones."""
    mine = flat(model)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    return all(torch.equal(mine, other) for other in all_of_them) and bool(mine.isfinite().all())
