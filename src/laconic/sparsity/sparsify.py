"""`sparsify`: train a model with few of its weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.comm.metered import Metered
from laconic.comm.torch_comm import TorchComm
from laconic.core import arguments
from laconic.core.errors import AttachError, SpecError
from laconic.core.spec import parse
from laconic.exchange.agreement import built_by_all
from laconic.optim.unwrapping import require_plain
from laconic.sparsity.densities import densities
from laconic.sparsity.mask_rule import MaskRule
from laconic.sparsity.selection import masked_weights
from laconic.sparsity.sparse_training import SparseTraining
from laconic.transforms.transform import DEFAULT_RUN, Option, Run, Transform


class Sparsifier(MaskRule, Transform):
    """Configuration of masks on a model's weights."""

    option: ClassVar[Option] = "sparsity"
    replicas_equal: ClassVar[bool] = True
    after_distribute: ClassVar[bool] = True

    def attach(
        self, model: nn.Module, optimizer: Optimizer | None = None, run: Run = DEFAULT_RUN
    ) -> SparseTraining:
        return sparsify(model, optimizer, self, steps=run.steps, seed=run.seed)


def sparsify(
    model: nn.Module,
    optimizer: Optimizer | None,
    spec: str | Sparsifier,
    *,
    steps: int,
    keep: Collection[str] = (),
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> SparseTraining:
    """Train a model with few of its weights.

    Masks Linear, convolution, recurrent, attention and Embedding layers. Parameters remain the same objects;
    masked entries are zero, also in gradients and optimiser state.

    Under DistributedDataParallel and `laconic.compress` all ranks have the same masks; call this on every
    rank, before or after either. With `compress(model, optimizer, "masked(...)")` gradients are sent without
    positions.

    Args:
        model: May be or contain a `DistributedDataParallel`. Changed in place.
        optimizer: Unwrapped from Accelerate, Fabric, Lightning and torchft; wrappers with their own step are
            rejected.
        spec: Such as "rigl(density=0.1)", or sparse_evolution, static_masks, gradual_pruning; equal on all
            ranks.
        steps: Steps of the whole training.
        keep: Modules that stay dense, with children.
        seed: Seed of random choices; equal on all ranks.
        group: The ranks that train together. None: those of the DistributedDataParallel; for a plain model
            all ranks, or this process without torch.distributed.

    Raises:
        SpecError: The spec or an argument is wrong.
        AttachError: On every rank, with nothing changed: the model has masks, a shared weight, an embedding
            with sparse gradients, or no such layers; `keep` names no module; the optimiser lacks a
            weight, wraps another, or has momentum outside its `state`; ranks disagree.
    """
    wrapped = next((each for each in model.modules() if isinstance(each, DistributedDataParallel)), None)
    plain = model if wrapped is None else wrapped.module
    comm = _comm(group if wrapped is None else wrapped.process_group)

    def build() -> SparseTraining:
        arguments.whole("steps", steps, 1)
        arguments.whole("seed", seed)
        made = parse(spec) if isinstance(spec, str) else spec
        plain_optimizer = require_plain(optimizer, "sparse training")
        if not isinstance(made, Sparsifier):
            raise SpecError(f"spec must be a sparsifier, such as rigl(density=0.1), got {made!r}")
        weights = masked_weights(plain, keep, made.layout)
        held = {each for one in plain_optimizer.param_groups for each in one["params"]}
        missing = [name for name, weight in weights.items() if weight not in held]
        if missing:
            raise AttachError(
                f"this {type(plain_optimizer).__name__} lacks {len(missing)} of {len(weights)} weights to"
                f" sparsify, such as {missing[0]}: build it from the parameters() of this model, or name the"
                " modules in keep="
            )
        shares = densities(
            {name: tuple(each.shape) for name, each in weights.items()}, made.density, made.layout
        )
        metered = None if comm is None else Metered(comm)
        return SparseTraining(
            plain, made, weights, shares, plain_optimizer, steps=steps, seed=seed, comm=metered
        )

    if comm is None:
        training = build()
    else:
        try:
            training = built_by_all(Metered(comm), build)
        except BaseException:
            comm.close()
            raise
    training.start()
    return training


def _comm(group: dist.ProcessGroup | None) -> TorchComm | None:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return None
    return TorchComm.own(group)
