"""What is asked of a model under `fully_shard`: its modules with parameters, and its groups of ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from laconic.core.errors import AttachError


def scattering(model: nn.Module) -> list[tuple[str, FSDPModule]]:
    """The modules that have a reduce-scatter: those under `fully_shard` with parameters of their own.

    Of modules that share one, after `fully_shard([a, b])`, the first.
    """
    modules = ((name, part) for name, part in model.named_modules() if isinstance(part, FSDPModule))
    firsts: dict[int, tuple[str, FSDPModule]] = {}
    for name, part in modules:
        if scatter_of(part) is not None:
            firsts.setdefault(id(param_group_of(part)), (name, part))
    return list(firsts.values())


def scatter_of(module: FSDPModule) -> Any:
    """A module's reduce-scatter, None where it has no parameters."""
    return getattr(param_group_of(module), "_reduce_scatter_comm", None)


def gather_of(module: FSDPModule) -> Any:
    """A module's all-gather, None where it has no parameters."""
    return getattr(param_group_of(module), "_all_gather_comm", None)


def param_group_of(module: FSDPModule) -> Any:
    """What FSDP2 keeps of a module's parameters, None where it has none. Private, and all that tells."""
    return module._get_fsdp_state()._fsdp_param_group


def trained_of(group: Any) -> tuple[bool, ...]:
    """Which of a module's parameters are trained now, of what `param_group_of` gives."""
    return tuple(part.sharded_param.requires_grad for part in group.fsdp_params)


def own_of(module: str, found: Any, ours: type[Any], what: str) -> Any:
    """FSDP's own collective of a module, of which `found` is in use, and `ours` is what we put there.

    Raises:
        AttachError: The user has set another.
    """
    if isinstance(found, ours):  # of a handle that is gone, and was not removed
        return found.before
    if not type(found).__module__.startswith("torch."):
        raise AttachError(
            f"{module or 'the model'} has a custom {what} already, {type(found).__name__}, and takes one:"
            " shard a new model without it"
        )
    return found


def groups_of(model: nn.Module) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """The ranks that share the parameters among them; and those that hold the same shard, None without any.

    Raises `AttachError` where parameters differ in these, or are sharded by more than `fully_shard`.
    """
    found: dict[tuple[Any, ...], tuple[dist.ProcessGroup, dist.ProcessGroup | None]] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue  # one that fully_shard was told to ignore
        placed, mesh = parameter.placements, parameter.device_mesh
        shards = [dim for dim, each in enumerate(placed) if isinstance(each, Shard)]
        replicas = [dim for dim, each in enumerate(placed) if isinstance(each, Replicate)]
        if len(shards) != 1 or len(replicas) > 1:
            raise AttachError(
                f"{name} is sharded along {len(shards)} dimensions of its mesh and replicated along"
                f" {len(replicas)}: compress takes models that fully_shard alone has sharded, on a mesh of"
                " one dimension, or of two for replicas of shards"
            )
        groups = (mesh.get_group(shards[0]), mesh.get_group(replicas[0]) if replicas else None)
        found[tuple(each and tuple(dist.get_process_group_ranks(each)) for each in groups)] = groups
    if len(found) != 1:
        raise AttachError(f"the model's parameters are sharded in {len(found)} groups of ranks, not in one")
    return next(iter(found.values()))


def refuse_complex(model: nn.Module) -> None:
    """Raise `AttachError` for complex parameters: chunks are reduced as real numbers."""
    name = next((name for name, each in model.named_parameters() if each.is_complex()), None)
    if name is not None:
        raise AttachError(
            f"{name} is complex, and a compressed reduce-scatter takes real gradients: keep it as real pairs,"
            " torch.view_as_real(...), or use DistributedDataParallel"
        )
