"""`distribute`: a plain model and optimiser, and one string that decides how replicas stay together."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, get_args

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.comm.comm import Comm
from laconic.comm.metered import Metered
from laconic.comm.torch_comm import TorchComm
from laconic.core.errors import AttachError, SpecError
from laconic.core.spec import parse
from laconic.strategies import ddp
from laconic.strategies.agreement import agree
from laconic.strategies.bond import GradientBond, ParameterBond, Statistics
from laconic.strategies.distributed_optimizer import DistributedOptimizer
from laconic.strategies.method import Method, lift
from laconic.strategies.replica import Replica
from laconic.strategies.state import model_digest
from laconic.strategies.strategy import BoundStrategy, Strategy

_distributed: weakref.WeakKeyDictionary[nn.Module, Strategy] = weakref.WeakKeyDictionary()


def distribute(
    model: nn.Module,
    optimizer: Optimizer,
    spec: Any,
    *,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
    statistics: Statistics = "average",
    **ddp_options: Any,
) -> tuple[nn.Module, DistributedOptimizer]:
    """Train this model on all ranks of the group by the strategy that `spec` names; use the pair as before.

    `model`: a plain module, on its device. `optimizer`: over its parameters. `spec`: a strategy such as
    "sgp(topology=exponential())" or "diloco(every=100)", whose ranks exchange parameters, or any method of
    `laconic.compress`, whose ranks exchange gradients under DistributedDataParallel; equal on all ranks.
    `group`: whose ranks take part, by default all. `seed`: of random topologies, sampling and rounding.
    `statistics`: whether the group's model has the mean of BatchNorm's running statistics or each rank's
    own; to estimate them anew, call `optimizer.finish()` and then `torch.optim.swa_utils.update_bn`.
    `ddp_options`: for DistributedDataParallel, where the spec is a method.

    All ranks begin with the first rank's parameters. Called by all ranks of the group. Raises `SpecError`
    for a wrong spec or one that does not fit the group's size, and `AttachError`, on every rank, for a model
    or an optimiser that will not do, one that is distributed already, and where ranks disagree.
    """
    if isinstance(model, DistributedDataParallel):
        raise AttachError(
            "distribute takes the plain model: give it model.module, or keep the wrapper and call"
            " laconic.compress(model, optimizer, spec)"
        )
    if isinstance(optimizer, DistributedOptimizer) or model in _distributed:
        raise AttachError("this model is distributed already: call its optimizer.remove() first")
    if statistics not in get_args(Statistics):
        raise AttachError(f"statistics must be one of {get_args(Statistics)}, got {statistics!r}")
    strategy = strategy_or_method(spec)
    if isinstance(strategy, Method):
        wrapped = DistributedDataParallel(model, process_group=group, **ddp_options)
        handle = ddp.compress(wrapped, optimizer, strategy, seed=seed)
        return wrapped, DistributedOptimizer(optimizer, GradientBond(handle))
    if ddp_options:
        option = next(iter(ddp_options))
        raise AttachError(f"{strategy!r} uses no DistributedDataParallel: it takes no {option}=")
    return model, _bind(model, optimizer, strategy, group, seed, statistics)


def strategy_or_method(spec: Any) -> Strategy | Method:
    """What `distribute` takes a spec for: a strategy as it is, and whatever else as the method it lifts to.

    >>> strategy_or_method("local_sgd(every=8)"), strategy_or_method("topk(density=0.01)")
    (local_sgd(), topk(density=0.01))
    """
    found = parse(spec) if isinstance(spec, str) else spec
    return found if isinstance(found, Strategy) else lift(found)


def _bind(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy,
    group: dist.ProcessGroup | None,
    seed: int,
    statistics: Statistics,
) -> DistributedOptimizer:
    own, aside = TorchComm.own(group), TorchComm.own(group)

    def close() -> None:
        own.close()
        aside.close()
        _distributed.pop(model, None)

    try:
        error: AttachError | SpecError | None = None
        try:
            replica = Replica(model, optimizer)
            strategy.check(own.size, optimizer)
        except (AttachError, SpecError) as refused:
            error = refused
        alike = {} if error else _fingerprint(strategy, seed, statistics, model_digest(replica.layout))
        agree(aside, alike, error)  # raises `error` itself
        comm = Metered(own)
        bound = _begin(replica, lambda: strategy.bind(replica, optimizer, comm, seed), aside)
        comm.reset()
    except BaseException:
        close()
        raise
    _distributed[model] = strategy
    bond = ParameterBond(strategy, bound, aside, seed=seed, statistics=statistics, close=close)
    return DistributedOptimizer(optimizer, bond)


def _begin(replica: Replica, bind: Callable[[], BoundStrategy], comm: Comm) -> BoundStrategy:
    """Flatten the model, take the first rank's, and put the strategy to work; on failure, all as it was."""
    replica.flatten()
    try:
        replica.adopt(comm)
        return bind()
    except BaseException:
        replica.release()
        raise


def _fingerprint(strategy: Strategy, seed: int, statistics: str, model: str) -> dict[str, str]:
    """What all ranks must have alike."""
    return {"the spec": repr(strategy), "the seed": str(seed), "statistics=": statistics, "the model": model}
