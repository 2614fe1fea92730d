"""One rank of `benchmarks.scaling`: a method at work on gradients as workers have them, every byte counted.

A gradient is what all workers share, plus noise of this worker and step: cubes of normal numbers, times a
scale a tensor, of which the largest is 100 times the smallest. The tensors are those of ResNet-50, at a
tenth of their sizes. A step is a whole exchange: error feedback, selection, messages, mean.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.resnet50 import SIZES
from laconic.comm.comm import Comm
from laconic.comm.metered import Metered
from laconic.comm.torch_comm import TorchComm
from laconic.comm.wire_model import PacketModel
from laconic.core.layout import Layout
from laconic.core.turn import mix
from laconic.exchange.attached import Attached
from laconic.exchange.method import lift
from laconic.exchange.no_optimiser import MOMENTUM_SGD

TENTH = tuple(-(-size // 10) for size in SIZES)
MODEL = Layout.of((f"layer{i}", (1, size)) for i, size in enumerate(TENTH))
COMMON = 0.5  # share of the gradient that all workers have, as a multiple of one worker's noise


class Messages(PacketModel):
    """A link without headers: what messages hold, and nothing else."""

    def forth(self, nbytes: int) -> int:
        return nbytes

    def back(self, nbytes: int) -> int:
        return 0


@dataclass(frozen=True)
class Traffic:
    """Of one rank, a step on average: bytes of messages, bytes on the wire with all headers, and seconds."""

    sent: float
    received: float
    network_sent: float
    network_received: float
    seconds: float
    realised: float  # share of the entries that changed


def play(spec: str, comm: Comm, first: int, steps: int) -> dict[str, float]:
    """The `Traffic` of `steps` steps, after `first` that are not counted, as a dictionary."""
    wire = Metered(comm)
    messages = Metered(wire, link=Messages())
    exchange = Attached(lift(spec), MODEL, messages, MOMENTUM_SGD, seed=1)
    bucket, changed, seconds = torch.empty(MODEL.numel), 0, 0.0
    for step in range(first + steps):
        if step == first:
            wire.reset()
            messages.reset()
        gradient_(bucket, comm.rank, step)
        began = time.perf_counter()
        exchange.begin()
        exchange.mean_(bucket, MODEL)
        exchange.end()
        if step >= first:
            seconds += time.perf_counter() - began
            changed += int(torch.count_nonzero(bucket))
    bare, full = messages.snapshot(), wire.snapshot()
    return asdict(
        Traffic(
            bare.network_sent / steps,
            bare.network_received / steps,
            full.network_sent / steps,
            full.network_received / steps,
            seconds / steps,
            changed / steps / MODEL.numel,
        )
    )


def gradient_(out: Tensor, rank: int, step: int) -> Tensor:
    """out float32 (n,) = the gradient of this rank in this step."""
    common, noise = _parts()
    start = mix(rank, step) % MODEL.numel
    return torch.add(noise[start : start + MODEL.numel], common, alpha=COMMON, out=out).mul_(_scales())


@lru_cache(maxsize=1)
def _parts() -> tuple[Tensor, Tensor]:
    """What all share float32 (n,), and noise float32 (2 n,), of which each takes a window of its own."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(MODEL.numel, generator=generator) ** 3
    noise = torch.randn(MODEL.numel, generator=generator) ** 3
    return common, torch.cat([noise, noise])


@lru_cache(maxsize=1)
def _scales() -> Tensor:
    """float32 (n,): 1 to 100 by tensor, at random."""
    generator = torch.Generator().manual_seed(1)
    scales = 100 ** torch.rand(len(MODEL), generator=generator)
    return torch.repeat_interleave(scales, torch.tensor(TENTH))


def one_process(spec: str, rank: int, size: int, port: int, first: int, steps: int) -> dict[str, float]:
    """One rank in a process of its own."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        return play(spec, TorchComm(), first, steps)
    finally:
        dist.barrier()
        dist.destroy_process_group()
