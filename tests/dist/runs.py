"""A rank's training in the tests of many methods and strategies: begin, train, stop and go, overflow."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.ddp.handle import Handle
from laconic.strategies.distributed_optimizer import DistributedOptimizer
from tests.dist.nets import SGD, agree, compress_anyway, flat, loss_of, momentum_for, net

MANY = {"bucket_cap_mb": 0.01}  # about eight buckets, regrouped after the first step


def compressed(
    spec: Any, model: nn.Module | None = None, *, scaler: Any = None, sgd: dict[str, Any] = SGD, **ddp: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, Handle]:
    """A model under DDP, an SGD and a handle on both, which is None without a spec."""
    wrapped = DistributedDataParallel(model or net(), **ddp)
    optimizer = torch.optim.SGD(wrapped.parameters(), **sgd)
    handle = None if spec is None else compress_anyway(wrapped, optimizer, spec, scaler=scaler)
    return wrapped, optimizer, handle  # type: ignore[return-value]


def distributed(spec: Any, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Any]:
    """A model, which differs by rank, and an SGD that suits the strategy, under `laconic.distribute`."""
    model = model or net(seed=dist.get_rank())
    momentum = momentum_for(spec)
    sgd = SGD | {"momentum": momentum, "nesterov": momentum > 0}
    return laconic.distribute(model, torch.optim.SGD(model.parameters(), **sgd), spec, **options)


def advance(
    model: Any, optimizer: Any, steps: int | Iterable[int], loss: Callable[[Any, int], Tensor] = loss_of
) -> list[float]:
    """Train for some steps; their losses."""
    losses = []
    for step in range(steps) if isinstance(steps, int) else steps:
        optimizer.zero_grad()
        value = loss(model, step)
        value.backward()
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.note_loss(value)
        optimizer.step()
        losses.append(value.item())
    return losses


def train(spec: Any, steps: int = 6, **ddp: Any) -> tuple[Tensor, bool, Any]:
    """Final parameters, whether replicas agree, and the handle's figures, after a few steps."""
    model, optimizer, handle = compressed(spec, **ddp)
    advance(model, optimizer, steps)
    return flat(model), agree(model), handle and handle.stats()


def scaled_step(scaler: torch.amp.GradScaler, optimizer: Any, loss: Tensor) -> None:
    """Backward and step by a GradScaler."""
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def trained(spec: Any, steps: int = 6, **options: Any) -> tuple[nn.Module, Any]:
    """A pair of `distributed` after some steps."""
    model, optimizer = distributed(spec, **options)
    advance(model, optimizer, steps)
    return model, optimizer


def resumed(make: Callable[[], Any], train: Callable[..., Any], total: int, stop: int) -> tuple[Any, Any]:
    """A training that never stopped, and one that a new pair took over: each a model and its optimizer."""
    whole, first, second = make(), make(), make()
    train(*whole, range(total))
    train(*first, range(stop))
    saved = copy.deepcopy(first[1].state_dict())
    second[0].load_state_dict(copy.deepcopy(first[0].state_dict()))
    second[1].load_state_dict(saved)
    train(*second, range(stop, total))
    return whole, second


def strategy_resumes(spec: Any, total: int, stop: int) -> bool:
    """Whether a strategy that stopped and went on has the bits of one that did not."""
    (whole, _), (model, _) = resumed(lambda: distributed(spec), advance, total, stop)
    return torch.equal(flat(whole), flat(model))


def everywhere(value: Any) -> list[Any]:
    """The values of all ranks, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def reloaded(state: Any) -> Any:
    """A state as it comes from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def stop_and_go(make: Callable[[bool], Any], total: int, stop: int, train: Any = advance) -> tuple[Any, Any]:
    """(model, optimizer, handle, ...) after all steps; and of new objects that went on from a file.

    `make(again)` makes the objects, of which a handle may be None.
    """
    whole, first = make(False), make(False)
    train(*whole[:2], range(total))
    train(*first[:2], range(stop))
    states = [None if part is None else part.state_dict() for part in _plain(*first)]
    second = make(True)
    for part, state in zip(_plain(*second), reloaded(states), strict=True):
        if part is not None:
            part.load_state_dict(state)
    train(*second[:2], range(stop, total))
    return whole, second


def _plain(model: Any, *others: Any) -> tuple[Any, ...]:
    return getattr(model, "module", model), *others


def same(one: Any, other: Any) -> bool:
    """Whether nested states are equal, bit for bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def method_resumes(spec: Any, total: int = 10, stop: int = 4) -> None:
    """A compressed run that stops, and goes on in other buckets, has the bits of one that does not."""

    def make(again: bool) -> Any:  # the trained model loads without Laconic
        return compressed(spec, net(99 * again), **({} if again else MANY))

    whole, second = stop_and_go(make, total, stop)
    assert torch.equal(flat(whole[0]), flat(second[0]))
    rank = dist.get_rank()
    assert all(key.startswith(f"rank{rank}/") for key in second[2].state_dict()["tensors"])


class Overflown(NamedTuple):
    """`moved`, `same`: whether parameters were changed and servers' memories kept, step by step."""

    moved: list[bool]
    same: list[bool]
    holds: bool  # a server's memory something at the end
    agreed: bool  # all ranks on the parameters
    scale: float
    state: dict[str, Tensor]


def overflow(spec: Any, when: int, steps: int = 4) -> Overflown:
    """Inf on rank 1 at one step, in the bucket that comes last: earlier ones have been exchanged by then."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    model, optimizer, handle = compressed(spec, scaler=scaler, **MANY)
    parameters, servers = [flat(model)], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == when and dist.get_rank() == 1:
            loss = loss + spike(next(model.parameters()))
        scaled_step(scaler, optimizer, loss)
        parameters.append(flat(model))
        state = handle.state_dict()["tensors"]
        assert all(bool(value.isfinite().all()) for value in state.values())
        servers.append([value for key, value in state.items() if "/once/server/" in key])
    same = [all(torch.equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in pairwise(servers)]
    moved = [not torch.equal(a, b) for a, b in pairwise(parameters)]
    holds = any(bool(value.any()) for value in servers[-1])
    return Overflown(moved, same, holds, agree(model), scaler.get_scale(), state)


def spike(weight: Tensor) -> Tensor:
    """Zero, with a gradient that is Inf in one place."""
    return _Spike.apply(weight)  # type: ignore[no-any-return]


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weight)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (weight,) = ctx.saved_tensors
        out = torch.zeros_like(weight)
        out.view(-1)[7] = math.inf
        return out
