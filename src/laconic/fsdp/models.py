"""Modules with parameters, and groups of ranks, of a model under `fully_shard`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from laconic.core.errors import AttachError


def sharded_modules(model: nn.Module) -> list[tuple[str, FSDPModule]]:
    """Return the modules with parameters, by name; of `fully_shard([a, b])` the first."""
    modules = ((name, part) for name, part in model.named_modules() if isinstance(part, FSDPModule))
    firsts: dict[int, tuple[str, FSDPModule]] = {}
    for name, part in modules:
        if scatter_of(part) is not None:
            firsts.setdefault(id(param_group_of(part)), (name, part))
    return list(firsts.values())


def scatter_of(module: FSDPModule) -> Any:
    return getattr(param_group_of(module), "_reduce_scatter_comm", None)


def gather_of(module: FSDPModule) -> Any:
    return getattr(param_group_of(module), "_all_gather_comm", None)


def param_group_of(module: FSDPModule) -> Any:
    return module._get_fsdp_state()._fsdp_param_group


def trained_of(group: Any) -> tuple[bool, ...]:
    return tuple(part.sharded_param.requires_grad for part in group.fsdp_params)


def default_collective(module: str, found: Any, ours: type[Any], what: str) -> Any:
    if isinstance(found, ours):  # of a handle freed without remove()
        return found.before
    if not type(found).__module__.startswith("torch."):
        raise AttachError(
            f"{module or 'the model'} already has the custom {what} {type(found).__name__}, and only one is"
            " possible: shard a new model without it"
        )
    return found


def groups_of(model: nn.Module) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return the group that shares the parameters, and the group that replicates a shard or None."""
    found: dict[tuple[Any, ...], tuple[dist.ProcessGroup, dist.ProcessGroup | None]] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue  # in ignored_params of fully_shard
        placed, mesh = parameter.placements, parameter.device_mesh
        shards = [dim for dim, each in enumerate(placed) if isinstance(each, Shard)]
        replicas = [dim for dim, each in enumerate(placed) if isinstance(each, Replicate)]
        if len(shards) != 1 or len(replicas) > 1:
            raise AttachError(
                f"{name} is sharded along {len(shards)} dimensions of its mesh and replicated along"
                f" {len(replicas)}: compress requires models sharded only by fully_shard, on a mesh of"
                " one dimension, or of two for replicas of shards"
            )
        groups = (mesh.get_group(shards[0]), mesh.get_group(replicas[0]) if replicas else None)
        found[tuple(each and tuple(dist.get_process_group_ranks(each)) for each in groups)] = groups
    if len(found) != 1:
        raise AttachError(f"the model's parameters must be sharded in 1 group of ranks, got {len(found)}")
    return next(iter(found.values()))


def refuse_complex(model: nn.Module) -> None:
    name = next((name for name, each in model.named_parameters() if each.is_complex()), None)
    if name is not None:
        raise AttachError(
            f"{name} is complex, and a compressed reduce-scatter requires real gradients: store real pairs,"
            " torch.view_as_real(...), or use DistributedDataParallel"
        )
