"""`laconic.compress` for DistributedDataParallel and `fully_shard`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.core.errors import AttachError
from laconic.ddp.attach import attach
from laconic.ddp.handle import Handle
from laconic.optim.unwrapping import unwrap_all

if TYPE_CHECKING:
    from laconic.fsdp.handle import ShardedHandle

FOREIGN = {
    "FullyShardedDataParallel": (
        "it is sharded by FSDP1, which lets no method encode what it sends: train with DDP, or shard it with"
        " fully_shard (FSDP2): fsdp_version=2 in Accelerate and transformers, ModelParallelStrategy in"
        " Lightning"
    ),
    "DeepSpeedEngine": (
        "DeepSpeed exchanges gradients by itself, with no seam for a method: train without its configuration,"
        " under DistributedDataParallel or fully_shard"
    ),
}


@overload
def compress(
    model: DistributedDataParallel,
    optimizer: Optimizer | Sequence[Optimizer],
    spec: Any,
    *,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
) -> Handle: ...


@overload
def compress(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    spec: Any,
    *,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
    parameters: Any = None,
) -> Handle | ShardedHandle: ...


def compress(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    spec: Any,
    *,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
    parameters: Any = None,
) -> Handle | ShardedHandle:
    """Exchange this model's gradients by the method `spec`.

    All ranks of the model's group must call it. The exchange lasts as long as the model, or until `remove()`.
    Copies of the model are not compressed.

    Example:
        One new line in a script for `torchrun`:

            dist.init_process_group("gloo")
            model = DistributedDataParallel(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            handle = laconic.compress(model, optimizer, "auto()")
            ...  # the loop is unchanged
            print(handle.stats().ratio)  # times fewer bytes on the wire than dense

    Args:
        model: A `DistributedDataParallel`, or a module that wraps one, as `torch.compile` and Fabric do; or a
            model under `fully_shard`, for methods such as "cgx(bits=4)"; with HSDP, they run between
            replicas.
        optimizer: The optimiser, or for DDP several with disjoint parameters. Parameters outside the model
            are not exchanged. Wrappers of Accelerate, Fabric, Lightning and torchft are unwrapped.
        spec: A string such as "dgc(density=0.001)", or an object from `laconic.parse`; equal on all ranks.
        scaler: The GradScaler in use, since memory is unscaled; not with `fully_shard`. None: that of a
            wrapped optimiser, if any.
        seed: Seed of sampling and stochastic rounding; equal on all ranks.
        parameters: A codec such as "minmax(bits=8)" for the all-gather of parameters under `fully_shard`;
            shards stay exact. Equal on all ranks. None: no compression.

    Returns:
        The handle of this rank: statistics, state, and `remove()`.

    Raises:
        AttachError: On every rank, with nothing attached: the model is unsupported or has a custom hook or
            reduce-scatter, the optimiser is compressed already or does not suit the method, the method cannot
            be sharded, or the ranks disagree.
        SpecError: The spec or the seed is invalid.
    """
    replicated = inside(model)
    if replicated is not None:
        if parameters is not None:
            raise AttachError(
                f"parameters={parameters!r} is only for fully_shard, whose ranks gather parameters;"
                " DistributedDataParallel does not gather them: omit it"
            )
        optimizers, scaler = unwrap_all(optimizer, scaler)
        return attach(replicated, optimizers, spec, scaler=scaler, seed=seed)
    if is_sharded(model):
        from laconic.fsdp.handle import compress_sharded

        held, scaler = unwrap_all(optimizer, scaler)
        if len(held) != 1:
            raise AttachError(
                f"a model under fully_shard takes one optimiser, got {len(held)}: pass the model's own"
            )
        return compress_sharded(model, held[0], spec, scaler=scaler, seed=seed, parameters=parameters)
    raise AttachError(
        f"compress needs a DistributedDataParallel, got {type(model).__name__}: {way_out(model)}"
    )


def way_out(model: Any) -> str:
    parts = model.modules() if isinstance(model, nn.Module) else (model,)
    kinds = {kind.__name__ for part in parts for kind in type(part).__mro__}
    for name, words in FOREIGN.items():
        if name in kinds:
            return words
    return (
        "wrap it first, model = DistributedDataParallel(model), or shard it with fully_shard. Where a trainer"
        " wraps it, give the wrapped one: trainer.model_wrapped of transformers, trainer.strategy.model of"
        " Lightning"
    )


def inside(model: Any) -> DistributedDataParallel | None:
    if isinstance(model, DistributedDataParallel):
        if any(kind.__module__.split(".")[0] == "torchft" for kind in type(model).__mro__):
            raise AttachError(
                "this is torchft's DistributedDataParallel, whose only hook is in use: build"
                " laconic.integrations.TorchftDDP(manager, module, spec) instead"
            )
        return model
    parts = model.modules() if isinstance(model, nn.Module) else ()
    found = [part for part in parts if isinstance(part, DistributedDataParallel)]
    if len(found) > 1:
        names = [type(each.module).__name__ for each in found]
        raise AttachError(
            f"{type(model).__name__} contains {len(found)} DistributedDataParallel, of {', '.join(names)}:"
            " call compress for each of them"
        )
    return found[0] if found else None


def is_sharded(model: Any) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # None if nothing is sharded
    parts = model.modules() if isinstance(model, nn.Module) else ()
    return any(isinstance(part, getattr(fsdp, "FSDPModule", ())) for part in parts)
