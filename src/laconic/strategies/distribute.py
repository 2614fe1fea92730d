"""`distribute`: a plain model and optimiser, and one string that decides how replicas stay together."""

from __future__ import annotations

import weakref
from typing import Any, get_args

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.core import arguments
from laconic.core.errors import AttachError, SpecError
from laconic.core.spec import parse
from laconic.strategies import ddp
from laconic.strategies.agreement import agree
from laconic.strategies.bond import GradientBond, ParameterBond, Statistics
from laconic.strategies.circle import Circle
from laconic.strategies.distributed_optimizer import DistributedOptimizer
from laconic.strategies.method import Method, lift
from laconic.strategies.replica import Replica
from laconic.strategies.state import model_digest
from laconic.strategies.strategy import Strategy

_distributed: weakref.WeakKeyDictionary[nn.Module, ParameterBond] = weakref.WeakKeyDictionary()


def distribute(
    model: nn.Module,
    optimizer: Optimizer,
    spec: Any,
    *,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
    statistics: Statistics = "average",
    patience_s: float | None = None,
    **ddp_options: Any,
) -> tuple[nn.Module, DistributedOptimizer]:
    """Train this model on all ranks of the group by the strategy that `spec` names; use the pair as before.

    `model`: a plain module, on its device. `optimizer`: over its parameters. `spec`: a strategy such as
    "sgp(topology=exponential())" or "diloco(every=100)", whose ranks exchange parameters, or any method of
    `laconic.compress`, whose ranks exchange gradients under DistributedDataParallel; equal on all ranks.
    `group`: whose ranks take part, by default all. `seed`: of random topologies, sampling and rounding.
    `statistics`: whether the group's model has the mean of BatchNorm's running statistics or each rank's
    own; to estimate them anew, call `optimizer.finish()` and then `torch.optim.swa_utils.update_bn`.
    `patience_s`: where it is given, a strategy outlasts the loss of ranks: those who wait for one this long,
    or hear that it is gone, go on with the others from the average of their models; and a new process in the
    place of a lost one takes that average when it calls this. By default a loss ends the training, as it does
    for methods always. `ddp_options`: for DistributedDataParallel, where the spec is a method.

    All ranks begin with the first rank's parameters. Called by all ranks of the group. Raises `SpecError`
    for a wrong spec or one that does not fit the group's size, and `AttachError`, on every rank, for a model
    or an optimiser that will not do, one that is distributed already, and where ranks disagree.
    """
    if isinstance(model, DistributedDataParallel):
        raise AttachError(
            "distribute takes the plain model: give it model.module, or keep the wrapper and call"
            " laconic.compress(model, optimizer, spec)"
        )
    known = _distributed.get(model)
    if isinstance(optimizer, DistributedOptimizer) or (known is not None and not known.removed):
        raise AttachError("this model is distributed already: call its optimizer.remove() first")
    if statistics not in get_args(Statistics):
        raise AttachError(f"statistics must be one of {get_args(Statistics)}, got {statistics!r}")
    strategy = strategy_or_method(spec)
    if patience_s is not None:
        arguments.number("patience_s", patience_s, above=0)
    if isinstance(strategy, Method):
        if patience_s is not None:
            raise AttachError(
                f"{strategy!r} needs every rank's gradient at every step, and takes no patience_s: let"
                " torchrun restart all ranks from a checkpoint, or take a strategy such as local_sgd()"
            )
        wrapped = DistributedDataParallel(model, process_group=group, **ddp_options)
        handle = ddp.compress(wrapped, optimizer, strategy, seed=seed)
        return wrapped, DistributedOptimizer(optimizer, GradientBond(handle))
    if ddp_options:
        option = next(iter(ddp_options))
        raise AttachError(f"{strategy!r} uses no DistributedDataParallel: it takes no {option}=")
    return model, _bind(model, optimizer, strategy, group, seed, statistics, patience_s)


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
    patience_s: float | None,
) -> DistributedOptimizer:
    circle = Circle(group, patience_s)
    try:
        error: AttachError | SpecError | None = None
        try:
            replica = Replica(model, optimizer)
            strategy.check(circle.own.size, optimizer)
        except (AttachError, SpecError) as refused:
            error = refused
        alike = {} if error else _fingerprint(strategy, seed, statistics, model_digest(replica.layout))
        if not circle.late:
            agree(circle.aside, alike, error)  # raises `error` itself
        elif error is not None:
            raise error
        if circle.roster is not None:
            circle.roster.alike(alike)
        replica.flatten()
        try:
            if not circle.late:
                replica.adopt(circle.aside)
            bond = ParameterBond(strategy, replica, optimizer, circle, seed=seed, statistics=statistics)
        except BaseException:
            replica.release()
            raise
    except BaseException:
        circle.close()
        raise
    _distributed[model] = bond
    return DistributedOptimizer(optimizer, bond)


def _fingerprint(strategy: Strategy, seed: int, statistics: str, model: str) -> dict[str, str]:
    """What all ranks must have alike."""
    return {"the spec": repr(strategy), "the seed": str(seed), "statistics=": statistics, "the model": model}
