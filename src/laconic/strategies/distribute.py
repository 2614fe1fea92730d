"""`distribute`: trains a plain model on many ranks."""

from __future__ import annotations

import difflib
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.core import arguments
from laconic.core.errors import AttachError
from laconic.core.spec import parse
from laconic.ddp.attach import attach
from laconic.ddp.compress import inside
from laconic.exchange.agreement import Fingerprint, agree
from laconic.exchange.method import Method, lift
from laconic.exchange.state import model_digest
from laconic.optim.unwrapping import check_is_scaler, is_ours, require_single_weights, unwrap_all
from laconic.strategies.controller import GradientController
from laconic.strategies.distributed_optimizer import DistributedOptimizer
from laconic.strategies.membership import Membership
from laconic.strategies.parameter_controller import ParameterController, Statistics
from laconic.strategies.replica import Replica
from laconic.strategies.several import as_one
from laconic.strategies.shared_scaler import check_scaler
from laconic.strategies.strategy import Strategy

_distributed: weakref.WeakKeyDictionary[nn.Module, ParameterController] = weakref.WeakKeyDictionary()


def distribute(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    spec: Any,
    *,
    group: dist.ProcessGroup | None = None,
    seed: int = 0,
    statistics: Statistics = "average",
    patience_s: float | None = None,
    quorum: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **ddp_options: Any,
) -> tuple[nn.Module, DistributedOptimizer]:
    """Train the model on all ranks of the group with the strategy or method named by `spec`.

    Use the returned pair as before. Every rank of the group calls this; all start with the first rank's
    parameters.

    Args:
        model: A plain module, already on its device.
        optimizer: An optimiser over the model's parameters, or several with disjoint parameters, which the
            returned one steps in order. A strategy also exchanges parameters that only the optimiser holds.
        spec: A strategy, whose ranks exchange parameters, such as "sgp(topology=exponential())", or a method
            of `laconic.compress`, whose ranks exchange gradients under DistributedDataParallel. The same on
            all ranks.
        group: The process group; default: all ranks.
        seed: Seed of sampling and rounding; default: 0. A random topology has its own, random_matching(seed).
        statistics: "average" (default): the group's model has the mean of BatchNorm's running statistics;
            "keep": each rank keeps its own. To re-estimate them, call `optimizer.finish()`, then
            `torch.optim.swa_utils.update_bn`.
        patience_s: Seconds until a silent rank counts as lost. The others then continue from their average; a
            new process in its place loads it, and a late rank rejoins at its next step. Until all ranks have
            called this, the group's timeout applies. Only for strategies. Default: a lost rank ends the
            training.
        quorum: Minimum number of ranks to continue after a loss, else each raises `PeerError`. Above half of
            all ranks, two parts of a split group never both train. Needs `patience_s`; default: 1.
        scaler: The GradScaler in use. A method stores its memory unscaled. With a strategy, an overflow on
            one rank makes all skip that update; costs 4 bytes per step. Default: none; each rank of a
            strategy then skips by its own scaler.
        ddp_options: Options of DistributedDataParallel, if the spec is a method.

    Returns:
        The model, wrapped in DistributedDataParallel if the spec is a method, and its `DistributedOptimizer`.

    Raises:
        SpecError: The spec or the seed is invalid, or the spec does not support the number of ranks.
        AttachError: On every rank: the model or the optimiser is not supported, the model is already
            distributed, the scaler is already shared or cannot be (`adpsgd`, `patience_s`), or the ranks
            disagree.
    """
    if inside(model) is not None:
        raise AttachError(
            "distribute needs the plain model: pass model.module, or keep the wrapper and call"
            " laconic.compress(model, optimizer, spec)"
        )
    optimizers, trainers = unwrap_all(optimizer)
    if trainers is not None:
        raise AttachError(
            "this optimiser steps through a trainer's GradScaler, which would not step the one that"
            " distribute returns: pass the plain optimiser to distribute, and your own scaler="
        )
    check_is_scaler(scaler)
    known = _distributed.get(model)
    wrapped_already = any(map(is_ours, optimizers))
    if wrapped_already or (known is not None and not known.removed):
        raise AttachError("this model is distributed already: call its optimizer.remove() first")
    if statistics not in get_args(Statistics):
        raise AttachError(f"statistics must be one of {get_args(Statistics)}, got {statistics!r}")
    strategy = strategy_or_method(spec)
    if patience_s is not None:
        arguments.number("patience_s", patience_s, above=0)
    if quorum is not None:
        arguments.whole("quorum", quorum, 1)
        if patience_s is None:
            raise AttachError(
                f"quorum={quorum} is the number of ranks that continue after a loss, which needs patience_s=:"
                " set patience_s too, or omit quorum"
            )
    if isinstance(strategy, Method):
        if patience_s is not None:
            raise AttachError(
                f"{strategy!r} needs every rank's gradient at every step, so patience_s is not supported: let"
                " torchrun restart all ranks from a checkpoint, or use a strategy such as local_sgd()"
            )
        wrapped = DistributedDataParallel(model, process_group=group, **ddp_options)
        handle = attach(wrapped, optimizers, strategy, scaler=scaler, seed=seed)
        try:
            controller = GradientController(handle, model.parameters())
            return wrapped, DistributedOptimizer(as_one(optimizers), controller, model)
        except BaseException:
            handle.abandon()
            raise
    if ddp_options:
        option = next(iter(ddp_options))
        near = difflib.get_close_matches(option, inspect.signature(distribute).parameters, n=1)
        if near:
            raise AttachError(f"distribute has no option {option}=: did you mean {near[0]}=?")
        raise AttachError(f"{strategy!r} does not use DistributedDataParallel: omit {option}=")
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    return model, _share(model, optimizers, strategy, group, seed, statistics, patience_s, quorum, scaler)


def strategy_or_method(spec: Any) -> Strategy | Method:
    """Return the strategy or method of a spec; codecs, selectors and reducers become methods.

    >>> strategy_or_method("local_sgd(every=8)"), strategy_or_method("topk(density=0.01)")
    (local_sgd(), topk(density=0.01))
    """
    found = parse(spec) if isinstance(spec, str) else spec
    return found if isinstance(found, Strategy) else lift(found)


def _share(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    strategy: Strategy,
    group: dist.ProcessGroup | None,
    seed: int,
    statistics: Statistics,
    patience_s: float | None,
    quorum: int | None,
    scaler: torch.amp.GradScaler | None,
) -> DistributedOptimizer:
    membership = Membership(group, patience_s, quorum)

    def describe() -> Fingerprint:
        if scaler is not None:
            check_scaler(scaler, strategy, patience_s)
        hint = "it counts ranks, and these are all there are"
        arguments.whole("quorum", quorum or 1, 1, membership.comm.size, hint)
        return {"the scaler": "none" if scaler is None else "given", "quorum=": str(quorum)}

    controller = bind(
        model, optimizers, strategy, membership, describe, seed=seed, statistics=statistics, scaler=scaler
    )
    try:
        made = DistributedOptimizer(controller.optimizer, controller, model, group)
    except BaseException:
        _abandon(controller)
        controller.replica.release()
        raise
    _distributed[model] = controller
    weakref.finalize(model, _abandon, controller).atexit = False
    return made


def bind(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    strategy: Strategy,
    membership: Membership,
    describe: Callable[[], Fingerprint],
    *,
    seed: int,
    statistics: Statistics,
    scaler: torch.amp.GradScaler | None = None,
) -> ParameterController:
    """Bind the strategy on every rank, from the first rank's parameters.

    `describe` returns further settings that must be equal. Errors are raised on every rank, with nothing
    changed.
    """
    optimizer: Optimizer
    replica: Replica

    def check() -> Fingerprint:
        nonlocal optimizer, replica
        arguments.whole("seed", seed)
        optimizer = as_one(optimizers)
        replica = Replica(model, optimizer)
        for each in optimizers:
            require_single_weights(each, repr(strategy))
            strategy.check(membership.comm.size, each)
        own = {"the spec": repr(strategy), "the seed": str(seed), "statistics=": statistics}
        return {**describe(), **own, "the model": model_digest(replica.layout)}

    try:
        alike = check() if membership.rejoining else agree(membership.start_comm, check)
        if membership.heartbeats is not None:
            membership.heartbeats.check_same_training(alike)
        replica.flatten()
        try:
            if not membership.rejoining:
                replica.adopt(membership.start_comm)
            membership.started()
            return ParameterController(
                strategy, replica, optimizer, membership, seed=seed, statistics=statistics, scaler=scaler
            )
        except BaseException:
            replica.release()
            raise
    except BaseException:
        membership.close()
        raise


def _abandon(controller: ParameterController) -> None:
    if not controller.removed:
        controller.bound.abandon()
        if controller.shared_scaler is not None:
            controller.shared_scaler.remove()
        controller.membership.abandon()
