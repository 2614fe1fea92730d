"""Contenders from elsewhere, each as a user would apply it.

PyTorch: DDP as it is, and the communication hooks that run on CPU with gloo; its bf16, quantisation and
batched PowerSGD hooks do not run there.

Plain torch: methods in ten lines, tensor by tensor after backward, in the manner of GRACE (Xu et al. 2021,
ICDCS): compress each tensor, gather what all ranks have, add it up. Tensors of one dimension are summed as
they are. Codes travel as int8, one an entry, as GRACE has them.

decent-dp (PyPI): each rank steps by itself, inside backward, and averages its model with a neighbour.

hivemind (PyPI): its 8-bit codec, in the pattern of its averager, tensor by tensor after backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.optim import SGD

from benchmarks.steps.running import LR, MOMENTUM, Running, ddp, gradient, matrices, sgd

ONE_BUCKET_MB = 4096  # PowerSGD's hook waits inside callbacks, which hangs on gloo with several buckets


def alone(model: nn.Module) -> Running:
    """The same step with no communication at all."""
    return Running(model, sgd(model))


def dense(model: nn.Module) -> Running:
    """DDP's all-reduce in float32."""
    made = ddp(model)
    return Running(made, sgd(made))


def nothing(model: nn.Module) -> Running:
    """DDP with a hook that exchanges nothing: what DDP's own buckets and copies cost."""
    made = ddp(model)
    made.register_comm_hook(None, debugging_hooks.noop_hook)
    return Running(made, sgd(made))


def fp16(model: nn.Module) -> Running:
    """All-reduce in float16."""
    made = ddp(model)
    made.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    return Running(made, sgd(made))


def powersgd(model: nn.Module, rank: int) -> Running:
    """PowerSGD of this rank, from the third step on, the earliest that it allows."""
    made = ddp(model, ONE_BUCKET_MB)
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, rank, start_powerSGD_iter=2)
    made.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Running(made, sgd(made))


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


class Within:
    """The optimiser of a model that steps within its backward pass."""

    def zero_grad(self) -> None:
        """Its hooks do that."""

    def step(self) -> None:
        """Its hooks have done that."""


def ring(model: nn.Module) -> Running:
    """Averages over a ring: each rank with one neighbour in this step, with the other in the next."""
    from decent_dp.ddp import DecentralizedDataParallel  # type: ignore[import-not-found]  # see installed.py
    from loguru import logger  # type: ignore[import-not-found]

    logger.remove()  # it tells its buckets on stderr

    def optimiser(named: list[tuple[str, Tensor]]) -> SGD:
        return SGD([parameter for _, parameter in named], lr=LR, momentum=MOMENTUM)

    made: Any = DecentralizedDataParallel(model, optim_fn=optimiser, topology="ring")
    return Running(made, Within())


def uniform8(model: nn.Module) -> Running:
    """Each rank averages its part of a tensor, which goes there and back in 256 levels of the codec's."""
    from hivemind.compression import (  # type: ignore[import-not-found]  # see installed.py
        CompressionInfo,
        Uniform8BitQuantization,
        deserialize_torch_tensor,
    )
    from hivemind.proto.runtime_pb2 import Tensor as Message  # type: ignore[import-not-found]

    codec, size = Uniform8BitQuantization(), dist.get_world_size()

    def packed(x: Tensor) -> Tensor:
        message = codec.compress(x, CompressionInfo.from_tensor(x))
        return torch.frombuffer(bytearray(message.SerializeToString()), dtype=torch.uint8)

    def unpacked(wire: Tensor) -> Tensor:
        x: Tensor = deserialize_torch_tensor(Message.FromString(wire.numpy().tobytes()))
        return x

    def exchange(p: nn.Parameter) -> Tensor:
        x = gradient(p)
        parts = F.pad(x, (0, -len(x) % size)).chunk(size)
        going = torch.stack([packed(part) for part in parts])
        coming = torch.empty_like(going)
        dist.all_to_all_single(coming, going)
        own = packed(torch.stack([unpacked(each) for each in coming]).mean(dim=0))
        everyone = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(everyone, own)
        return torch.cat([unpacked(each) for each in everyone])[: len(x)]

    return running(model, exchange)
