"""Rehearsal of a strategy: ranks as threads do some steps, and the mean cost of whole periods is recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import nn

from laconic.comm.metered import Metered
from laconic.core.errors import LaconicError, SpecError
from laconic.core.layout import Layout
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import Strategy
from laconic.tools.plan.rehearsal import (
    SIZES,
    Played,
    Rehearsed,
    When,
    costliest,
    excerpt,
    figures,
    fitted,
    in_turns,
)
from laconic.tools.plan.stage import Gradients, InTurn

STEPS = 2  # for warm-up; at least as many are recorded
MAX_ELEMENTS = 1 << 23
LEAST_ELEMENTS = 1 << 16


def rehearse_strategies(
    strategies: Iterable[Strategy], layout: Layout, sizes: Sequence[int] = SIZES
) -> Iterator[Rehearsed]:
    """Yield each strategy's cost. Raises `SpecError` if one depends on clocks, or rejects all sizes."""
    for strategy in strategies:
        if strategy.clocked:
            raise SpecError(
                f"{strategy!r} depends on which worker is faster, so a rehearsal cannot tell what it"
                " will send: leave it out"
            )
        part = excerpt(layout, max(LEAST_ELEMENTS, MAX_ELEMENTS // (STEPS + _counted(strategy))))
        gradients = Gradients(part)
        fitting = [size for size in sizes if not _refusal(strategy, part, size)]
        if not fitting:
            raise SpecError(f"{_refusal(strategy, part, sizes[-1])}; leave it out of the plan")
        played = {
            size: costliest(in_turns(size, partial(_one, strategy, part, gradients))) for size in fitting
        }
        when: When = "next step" if strategy.overlaps else "after update"
        yield fitted(repr(strategy), played, layout.numel / part.numel, when)


def _counted(strategy: Strategy) -> int:
    return strategy.period * -(-STEPS // strategy.period)


def _refusal(strategy: Strategy, layout: Layout, size: int) -> LaconicError | None:
    try:
        strategy.check(size, _sgd(_model(layout)))
    except LaconicError as error:
        return error
    return None


def _model(layout: Layout) -> nn.Module:
    return nn.ParameterList(torch.zeros(entry.shape, dtype=torch.float32, device="cpu") for entry in layout)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _one(strategy: Strategy, layout: Layout, gradients: Gradients, inner: InTurn) -> Played:
    comm, watch, counted = Metered(inner), inner.watch, _counted(strategy)
    model = _model(layout)
    optimizer = _sgd(model)
    replica = Replica(model, optimizer)
    replica.flatten()
    gradient = torch.empty(layout.numel, dtype=torch.float32, device="cpu")
    for parameter, view in zip(model.parameters(), replica.views(gradient).values(), strict=True):
        parameter.grad = view

    def update() -> None:
        watch.stop()
        optimizer.step()
        watch.resume()

    coding_s = 0.0
    with closing(strategy.bind(replica, optimizer, comm)) as bound:
        for step in range(STEPS + counted):
            if step == STEPS:
                comm.reset()
                coding_s = 0.0
            gradients.write_(gradient, comm.rank, step)
            watch.start()
            bound.step(update, 1.0)
            watch.stop()
            coding_s += watch.before_s + watch.after_s
        calls, nbytes = figures(comm, counted)
        bound.drain(inner)
    return Played(calls, nbytes, coding_s / counted, 0.0)
