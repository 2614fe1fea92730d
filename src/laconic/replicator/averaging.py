"""Averaging: replicas in sync exchange gradients at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from laconic.comm.metered import Metered
from laconic.core.errors import SpecError
from laconic.ddp.handle import Handle
from laconic.exchange.agreement import agree, built_by_all
from laconic.exchange.gathered import GatheredState
from laconic.exchange.gathers import warn_of_gathers
from laconic.exchange.method import Method, lift
from laconic.replicator.deployment import RankContext
from laconic.replicator.parameters import buckets, named
from laconic.strategies.controller import GradientController
from laconic.strategies.distribute import strategy_or_method
from laconic.strategies.strategy import Update


class Averaging(GradientController):
    def __init__(
        self, handle: Handle, optimizer: Optimizer, waiting: Callable[[], AbstractContextManager[object]]
    ) -> None:
        parameters = list(named(optimizer))
        super().__init__(handle, parameters)
        self._buckets = buckets(parameters)
        self._waiting = waiting
        in_step = any(rule.exchanges_in_step for rule in handle.method.rules)
        self._stepping = waiting if in_step else nullcontext

    def step(self, update: Update, loss: float | None) -> None:
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.fill()
            answers = [self.handle.buckets.submit(bucket) for bucket in self._buckets]
            with self._waiting():
                for answer in answers:
                    self.handle.buckets.wait(answer)
            for bucket in self._buckets:
                bucket.write_gradients()
        with self._stepping():
            update()

    def gathered(self, optimiser: Mapping[str, Any]) -> tuple[GatheredState, list[Any]]:
        with self._waiting():
            return super().gathered(optimiser)

    @contextmanager
    def averaged(self) -> Iterator[float]:
        with ExitStack() as stack:
            with self._waiting():
                distance = stack.enter_context(super().averaged())
            yield distance

    def finish(self) -> None:
        with self._waiting():
            super().finish()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._waiting():
            super().load_state_dict(state)

    def remove(self) -> None:
        with self._waiting():
            super().remove()

    def end(self) -> None:
        self.handle.buckets.end()


def averaging(context: RankContext, optimizer: Optimizer, compressor: Any, name: str, seed: int) -> Averaging:
    """Bind averaging to this replica, with the first replica's parameters; all replicas in sync call it."""
    comm = Metered(context.side)

    def build() -> Handle:
        handle = Handle(as_method(compressor), named(optimizer), optimizer, comm, seed=seed)
        if comm.rank == 0:
            warn_of_gathers(handle.method, handle.layout, comm.size)
        return handle

    with context.waiting():
        agree(comm, lambda: {"the optimiser's name": name})
        handle = built_by_all(comm, build, Handle.abandon)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for each in group["params"]:
                    comm.broadcast(each.data)
    comm.reset()
    return Averaging(handle, optimizer, context.waiting)


def as_method(compressor: Any) -> Method:
    found = strategy_or_method(compressor)
    if not isinstance(found, Method):
        raise SpecError(
            f"compressor= must be a method, codec, selector or reducer, got the strategy {found!r}: choose"
            " the strategy by the deployment, or use topology= for gossip"
        )
    return lift(found)
