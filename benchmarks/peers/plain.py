"""What a user would write: methods in ten lines of plain torch, tensor by tensor after backward.

In the manner of GRACE (Xu et al. 2021, ICDCS): compress each tensor, gather what all ranks have, add it up.
Tensors of one dimension are summed as they are. Codes travel as int8, one an entry, as GRACE has them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers.running import MOMENTUM, Running, gradient, matrices, sgd

Exchange = Callable[[nn.Parameter], Tensor]  # one tensor's mean, flat


def dgc(model: nn.Module, density: float = 0.001) -> Running:
    """DGC: momentum before the exchange, a threshold from a sample, values and int64 positions gathered."""
    memory = {p: (torch.zeros(p.numel()), torch.zeros(p.numel())) for p in matrices(model)[0]}

    def exchange(p: nn.Parameter) -> Tensor:
        velocity, residual = memory[p]
        residual += velocity.mul_(MOMENTUM).add_(gradient(p))
        size = residual.abs()
        sample = size[torch.randint(len(size), (max(1, len(size) // 100),))]
        threshold = sample.topk(max(1, int(density * len(sample)))).values[-1]
        chosen = (size >= threshold).nonzero().flatten()
        mean = torch.zeros(len(size))
        for values, positions in zip(gathered(residual[chosen]), gathered(chosen), strict=True):
            mean.index_add_(0, positions, values, alpha=1 / dist.get_world_size())
        velocity[chosen] = residual[chosen] = 0
        return mean

    return running(model, exchange, momentum=0.0)


def qsgd(model: nn.Module, levels: int = 7) -> Running:
    """QSGD: each entry as one of `levels` parts of the tensor's norm, rounded at random."""

    def exchange(p: nn.Parameter) -> Tensor:
        x = gradient(p)
        norm = x.norm()
        scaled = x.abs().mul_(levels / norm)
        codes = (scaled + torch.rand_like(scaled)).floor_().mul_(x.sign()).to(torch.int8)
        return mean_of(codes, norm / levels)

    return running(model, exchange)


def terngrad(model: nn.Module) -> Running:
    """TernGrad: clipped at 2.5 standard deviations, then sign or nothing, times the largest."""

    def exchange(p: nn.Parameter) -> Tensor:
        x = gradient(p)
        limit = float(2.5 * x.std(correction=0))
        clipped = x.clamp(-limit, limit)
        largest = clipped.abs().max()
        codes = torch.bernoulli(clipped.abs() / largest).mul_(clipped.sign()).to(torch.int8)
        return mean_of(codes, largest)

    return running(model, exchange)


def running(model: nn.Module, exchange: Exchange, momentum: float = MOMENTUM) -> Running:
    """A plain model whose matrices are exchanged by this and whose other tensors are summed."""
    large, small = matrices(model)

    def exchange_all() -> None:
        for p in large:
            p.grad = exchange(p).view_as(p)
        for p in small:
            assert p.grad is not None
            dist.all_reduce(p.grad.div_(dist.get_world_size()))

    return Running(model, sgd(model, momentum), exchange_all)


def mean_of(codes: Tensor, scale: Tensor) -> Tensor:
    """The mean over ranks of codes times scales."""
    everyone = [torch.empty_like(codes) for _ in range(dist.get_world_size())]
    scales = [torch.empty(1) for _ in everyone]
    dist.all_gather(everyone, codes)
    dist.all_gather(scales, scale.view(1))
    mean = torch.zeros(codes.numel())
    for each, of_rank in zip(everyone, scales, strict=True):
        mean.add_(each, alpha=float(of_rank) / len(everyone))
    return mean


def gathered(x: Tensor) -> list[Tensor]:
    """Every rank's x, of whatever length: padded to the longest, as gloo gathers only equal ones."""
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(x)]))
    longest = int(max(lengths))
    room = [x.new_empty(longest) for _ in lengths]
    dist.all_gather(room, torch.cat([x, x.new_empty(longest - len(x))]))
    return [each[: int(length)] for each, length in zip(room, lengths, strict=True)]
