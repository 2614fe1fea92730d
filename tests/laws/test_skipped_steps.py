"""A step that is skipped leaves no trace: every memory is to the last bit what it was before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.comm.loopback import Loopback
from laconic.core.layout import Layout
from laconic.exchange.method import lift
from tests import cases

from .method_ranks import Rank
from .table import compressors, first_of_each, same
from .worlds import MODEL, cut, put, take

HUGE = 1e12  # in one tensor, while another one is not finite: what must not come back
STEPS = 3
Spoil = Callable[[Tensor, Rank], None]


def entry_of(name: str, value: float, rank: int = 1) -> Spoil:
    """One entry of a tensor, on one rank."""

    def spoil(flat: Tensor, on: Rank) -> None:
        if on.comm.rank == rank:
            flat[MODEL[name].offset + 3] = value

    return spoil


def overflowing(flat: Tensor, on: Rank) -> None:
    """Finite on each rank; times the scale the mean is not."""
    entry = MODEL["a.weight"]
    flat[entry.offset : entry.offset + entry.numel] = 3e38


# buckets, what is wrong with the step, the scale of a GradScaler
CASES: dict[str, tuple[list[Layout], Spoil, float]] = {
    "NaN in the first of two buckets": (cut(MODEL, 2, 2), entry_of("c.weight", torch.nan), 1.0),
    "Inf in the last of two buckets": (cut(MODEL, 2, 2), entry_of("a.weight", torch.inf), 1.0),
    "Inf in the third of four buckets, scaled": (
        cut(MODEL, 1, 1, 1, 1),
        entry_of("a.bias", -torch.inf),
        1024.0,
    ),
    "NaN on rank 0 in one bucket": ([MODEL], entry_of("b.weight", torch.nan, rank=0), 1.0),
    "a mean that overflows in the last bucket": (cut(MODEL, 2, 2), overflowing, 65536.0),
}


def taken(rank: Rank, flat: Tensor, buckets: list[Layout], scale: float, wait: bool) -> Tensor:
    """One exchange of this scaled gradient: the mean, unscaled."""
    exchange, means = rank.exchange, []
    exchange.begin()
    for bucket in buckets:
        means.append(take(flat * scale, MODEL, bucket))
        exchange.mean_(means[-1], bucket, scale, wait=wait)
    exchange.end()
    mean = torch.zeros_like(flat)
    for bucket, part in zip(buckets, means, strict=True):
        put(part, bucket, mean, MODEL)
    return mean / scale


def train(rank: Rank, flat: Tensor, buckets: list[Layout], scale: float, wait: bool) -> Tensor:
    """One step; a skipped one updates nothing. Returns the mean."""
    mean = taken(rank, flat, buckets, scale, wait)
    for name, view in zip(MODEL.names, MODEL.segments.views(mean), strict=True):
        rank.parameters[name].grad = view.clone().view(rank.parameters[name].shape)
    if rank.exchange.skip_reason is None:
        rank.optimizer.step()
    return mean


def through_a_skipped_step(
    spec: str, case: str, begin: int, when: int, wait: bool, comm: Loopback
) -> list[str]:
    """What is wrong after a step that is skipped, `when` steps after step `begin`."""
    buckets, spoil, scale = CASES[case]
    rank, other, wrong = Rank(spec, comm, begin), Rank(spec, comm, begin), []
    for step in range(begin, begin + when):
        for each in (rank, other):
            train(each, each.gradient(step), buckets, scale, wait)
    flat, model = rank.gradient(begin + when), rank.flat
    flat[MODEL["b.weight"].offset :][:600] *= HUGE
    spoil(flat, rank)
    before = rank.memory()
    momentum = {name: _momentum(rank, name) for name in MODEL.names}
    mean = train(rank, flat, buckets, scale, wait)
    after = rank.memory()
    wrong += ["not skipped"] * (rank.exchange.skip_reason is None)
    wrong += ["no NaN"] * (not bool(mean.isnan().any()))
    wrong += ["the model has moved"] * (not same(model, rank.flat))
    wrong += ["other keys"] * (before.keys() != after.keys())
    wrong += [key for key in before if not same(before[key], after[key])]
    for name, old in momentum.items():
        new = _momentum(rank, name)
        wrong += [f"momentum of {name}"] * (old is not new and (old is None or not same(old, new)))
    other.exchange.step += 1
    for step in range(begin + when + 1, begin + when + 3):
        means = [train(each, each.gradient(step), buckets, scale, wait) for each in (rank, other)]
        if not (lift(spec).adaptive or same(*means)):
            wrong.append(f"other bits in step {step}")
    return wrong


def test_a_skipped_step_leaves_every_memory_as_it_was() -> None:
    """Whatever bucket is bad, on whatever rank, and where means are written; in the first step, in the first
    after a warm-up, and later. The next steps have the bits of a run that skipped the step by itself.

    The first example of each name has every second case in turn, or all if it has a warm-up; the others have
    one. With `--full` all have all.
    """
    every = compressors()
    first = {*first_of_each(every)}
    for turn, spec in enumerate(every):
        warm = lift(spec).warm_at
        starts = [(0, 1), (0, STEPS), (0, 0)] + ([(warm - 1, 1), (warm, 0), (warm, STEPS)] if warm else [])
        runs = [(case, wait) for case in CASES for wait in ((False, True) if "last" in case else (True,))]
        every_nth = (1 if warm or cases.full else 2) if spec in first else len(runs)
        for number, (case, wait) in enumerate(runs):
            if (number - turn) % every_nth:
                continue
            if case.startswith("a mean") and not remembers(spec):
                continue  # nothing is at stake, and the mean itself is Inf
            begin, when = starts[number % len(starts)]
            for found in Loopback.run(2, partial(through_a_skipped_step, spec, case, begin, when, wait)):
                assert not found, (spec, case, f"{begin} + {when} steps, wait {wait}", found)


def _momentum(rank: Rank, name: str) -> Any:
    state = rank.optimizer.state.get(rank.parameters[name])
    return None if not state else state.get("momentum_buffer")


def remembers(spec: str) -> bool:
    (comm,) = Loopback.world(1)
    return bool(Rank(spec, comm).exchange.remembers)
