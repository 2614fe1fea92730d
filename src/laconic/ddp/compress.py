"""The front door: one call for a model under DistributedDataParallel, and for one under `fully_shard`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.core.errors import AttachError
from laconic.ddp.handle import Handle
from laconic.ddp.hook import attach
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
    """Exchange this model's gradients by the method that `spec` names; the rest of the script stays as it is.

    All ranks of the model's group must call it. The exchange lives as long as the model, or until `remove()`.
    A copy of a compressed DistributedDataParallel, by deepcopy, pickle or `torch.save`, is a plain one.

    Example:
        The one new line of a script that `torchrun` starts on each rank:

            dist.init_process_group("gloo")
            model = DistributedDataParallel(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            handle = laconic.compress(model, optimizer, "auto()")
            ...  # the loop as it is
            print(handle.stats().ratio)  # times fewer bytes on the wire than dense

    Args:
        model: A `DistributedDataParallel`, before its first backward pass or later, or a module around one,
            as `torch.compile` and Fabric make them; or a model under `fully_shard`, for methods such as
            "cgx(bits=4)", which compress all its gradients. Where shards have replicas (HSDP), the method
            goes between these.
        optimizer: The optimiser of the model's parameters, or a list of several, each with its own of them.
            It may also hold others, such as a loss's, which stay as they are. Those that Accelerate, Fabric,
            Lightning and torchft have wrapped are unwrapped.
        spec: A string such as "dgc(density=0.001)", or what `laconic.parse` returns; equal on all ranks.
        scaler: The GradScaler in use, so that memory is kept unscaled; not with `fully_shard`. Default: that
            of a wrapped optimiser, if it has one.
        seed: Seed of sampling and stochastic rounding; equal on all ranks.
        parameters: A codec such as "minmax(bits=8)" for the all-gather of parameters under `fully_shard`;
            shards stay exact. Equal on all ranks. Default: none, parameters are gathered as they are.

    Returns:
        The handle of this rank: figures, state, and `remove()`.

    Raises:
        AttachError: On every rank, with nothing attached: the model is of another kind or has another hook or
            reduce-scatter, the optimiser is compressed already or does not suit the method, the method cannot
            be sharded, or the ranks disagree.
        SpecError: The spec or the seed is wrong.
    """
    replicated = inside(model)
    if replicated is not None:
        if parameters is not None:
            raise AttachError(
                f"parameters={parameters!r} is for fully_shard, whose ranks gather parameters; under"
                " DistributedDataParallel each has them all: leave it out"
            )
        optimizers, scaler = unwrap_all(optimizer, scaler)
        return attach(replicated, optimizers, spec, scaler=scaler, seed=seed)
    if is_sharded(model):
        from laconic.fsdp.handle import compress_sharded

        held, scaler = unwrap_all(optimizer, scaler)
        if len(held) != 1:
            raise AttachError(
                f"a model under fully_shard takes one optimiser, got {len(held)}: give the one it has"
            )
        return compress_sharded(model, held[0], spec, scaler=scaler, seed=seed, parameters=parameters)
    raise AttachError(
        f"compress needs a DistributedDataParallel, got {type(model).__name__}: {way_out(model)}"
    )


def way_out(model: Any) -> str:
    """What to do about a model that is neither replicated by torch nor sharded by `fully_shard`."""
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
    """The DistributedDataParallel that this is or holds. Raises `AttachError` if it holds several."""
    if isinstance(model, DistributedDataParallel):
        if any(kind.__module__.split(".")[0] == "torchft" for kind in type(model).__mro__):
            raise AttachError(
                "this is torchft's DistributedDataParallel, whose only hook is taken: build"
                " laconic.integrations.TorchftDDP(manager, module, spec) in its place"
            )
        return model
    parts = model.modules() if isinstance(model, nn.Module) else ()
    found = [part for part in parts if isinstance(part, DistributedDataParallel)]
    if len(found) > 1:
        names = [type(each.module).__name__ for each in found]
        raise AttachError(
            f"{type(model).__name__} holds {len(found)} DistributedDataParallel, around {', '.join(names)}:"
            " call compress for each of them"
        )
    return found[0] if found else None


def is_sharded(model: Any) -> bool:
    """Whether `fully_shard` was called on this model or on a part of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where it is not imported, nothing is sharded
    parts = model.modules() if isinstance(model, nn.Module) else ()
    return any(isinstance(part, getattr(fsdp, "FSDPModule", ())) for part in parts)
