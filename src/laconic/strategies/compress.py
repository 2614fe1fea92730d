"""The front door: one call for a model under DistributedDataParallel, and for one under `fully_shard`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.strategies import ddp
from laconic.strategies.handle import Handle

if TYPE_CHECKING:
    from laconic.strategies.fsdp import ShardedHandle


@overload
def compress(
    model: DistributedDataParallel,
    optimizer: Optimizer,
    spec: Any,
    *,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
) -> Handle: ...


@overload
def compress(
    model: nn.Module,
    optimizer: Optimizer,
    spec: Any,
    *,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
) -> Handle | ShardedHandle: ...


def compress(
    model: nn.Module,
    optimizer: Optimizer,
    spec: Any,
    *,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
) -> Handle | ShardedHandle:
    """Exchange this model's gradients by the method that `spec` names; the rest of the script stays as it is.

    `model`: a DistributedDataParallel, before its first backward or later; or under `fully_shard`, for
    methods without memory such as "cgx(bits=4)", all of whose gradients it then compresses. `optimizer`:
    over its parameters. `spec`: a string such as "dgc(density=0.001)", or what `laconic.parse` returns; equal
    on all ranks. `scaler`: the GradScaler in use, so that memory is kept unscaled; not with `fully_shard`.
    `seed`: of sampling and stochastic rounding.

    Called by all ranks of the model's group. Raises `AttachError` on every rank, with nothing attached, for
    a model of another kind or with another hook or reduce-scatter, an optimiser that is compressed already or
    that the method cannot use, a method that cannot be sharded, and where ranks disagree; `SpecError` for a
    wrong spec.
    """
    if not isinstance(model, DistributedDataParallel) and is_sharded(model):
        from laconic.strategies.fsdp import compress_sharded

        return compress_sharded(model, optimizer, spec, scaler=scaler, seed=seed)
    return ddp.compress(model, optimizer, spec, scaler=scaler, seed=seed)  # type: ignore[arg-type]  # it looks itself


def is_sharded(model: Any) -> bool:
    """Whether `fully_shard` was called on this model or on a part of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where it is not imported, nothing is sharded
    parts = model.modules() if isinstance(model, nn.Module) else ()
    return any(isinstance(part, getattr(fsdp, "FSDPModule", ())) for part in parts)
