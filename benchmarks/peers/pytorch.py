"""PyTorch's own: DDP as it is, and the communication hooks that run on CPU with gloo.

Its bf16, quantisation and batched PowerSGD hooks do not run there.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from benchmarks.peers.running import Running, ddp, sgd

ONE_BUCKET_MB = 4096  # PowerSGD's hook waits inside callbacks, which hangs on gloo with several buckets


def alone(model: nn.Module) -> Running:
    """The same step with no communication at all."""
    return Running(model, sgd(model))


def dense(model: nn.Module) -> Running:
    """DDP's all-reduce in float32."""
    made = ddp(model)
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
