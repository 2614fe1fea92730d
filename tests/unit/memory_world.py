"""What reducers keep, in small worlds: is it all that is missing, put back after skipped steps, and saved?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tests.laws.worlds import MODEL, cut, everywhere, exchange_on, gradient, one_step
from torch import Tensor

from laconic.comm.loopback import Loopback
from laconic.exchange.attached import Attached
from laconic.exchange.state import FORMAT, RankState, label, model_digest

STEPS = 6


def held(state: Mapping[str, Tensor], kind: str) -> Tensor:
    """The memory of one kind on one rank, float64, flat in the model's order."""
    flat = torch.zeros(MODEL.numel, dtype=torch.float64)
    for key, value in state.items():
        if f"/{kind}/" in key:
            at = MODEL[key.split("/")[-1]].offset
            flat[at : at + value.numel()] += value.flatten()
    return flat


def lost(spec, size, kind, cuts=([MODEL],) * STEPS) -> tuple[float, Tensor]:
    """All gradients - N * (all means + what is kept of them, of this kind) - what the ranks hold.

    The largest entry of it, as a share of the largest gradient; and what is kept.
    """

    def play(comm: Loopback) -> tuple[list[Tensor], dict[str, Tensor]]:
        exchange = exchange_on(comm, spec)
        means = [one_step(exchange, gradient(comm.rank, t), buckets)[0] for t, buckets in enumerate(cuts)]
        return means, exchange.state_dict()

    results = everywhere(size, play)
    given = sum(gradient(r, t).double() for r in range(size) for t in range(len(cuts)))
    applied = sum(mean.double() for mean in results[0][0])
    ranks = sum(held(state, "residual") for _, state in results)
    kept = sum(held(state, kind) for _, state in results)
    missing = (given - size * (applied + kept) - ranks).abs().max() / given.abs().max()
    return float(missing), kept


def through_a_void_step(spec: str, kind: str, when: int) -> list[int]:
    """How many tensors of this kind the ranks hold before a skipped step; it must leave them as they were.

    Inf on rank 1 of 3 in the last bucket, when two have been reduced, also while buckets are regrouped.
    """
    inf_at = MODEL["a.weight"].offset + 77

    def play(comm: Loopback) -> int:
        exchange, before = exchange_on(comm, spec), {}
        for t in range(5):
            flat = gradient(comm.rank, t)
            if t == when:
                before = {key: value for key, value in exchange.state_dict().items() if f"/{kind}/" in key}
                flat[inf_at] = math.inf if comm.rank == 1 else flat[inf_at]
            _, valid = one_step(exchange, flat, cut(MODEL, 1, 2, 1) if t < 1 else cut(MODEL, 2, 1, 1))
            assert valid == (t != when)
            if t == when:
                after = exchange.state_dict()
                assert before and all(torch.equal(after[key], value) for key, value in before.items())
        return sum(1 for value in before.values() if value.any())

    return everywhere(3, play)


def resumed(spec: str, size: int = 3) -> list[Any]:
    """Whether ranks that load their states after 3 steps go on with the same bits, whatever the buckets."""

    def play(comm: Loopback) -> list[bool]:
        unbroken, before, after = (exchange_on(comm, spec) for _ in range(3))
        expected = [one_step(unbroken, gradient(comm.rank, t), [MODEL])[0] for t in range(STEPS)]
        for t in range(3):
            one_step(before, gradient(comm.rank, t), cut(MODEL, 2, 2))
        after.load_state_dict(before.state_dict(), step=3)
        got = [one_step(after, gradient(comm.rank, t), cut(MODEL, 1, 3))[0] for t in range(3, STEPS)]
        return [torch.equal(a, b) for a, b in zip(expected[3:], got, strict=True)]

    return everywhere(size, play)


def states(size: int, spec: str) -> list[RankState]:
    """What the ranks save after three steps."""

    def play(comm: Loopback) -> RankState:
        exchange = exchange_on(comm, spec)
        for t in range(3):
            one_step(exchange, gradient(comm.rank, t), [MODEL])
        return saved(comm, exchange, spec)

    return everywhere(size, play)


def saved(comm: Loopback, exchange: Attached, spec: str) -> RankState:
    about = {"format": FORMAT, "spec": spec, "model": model_digest(MODEL), "seed": 0, "step": exchange.step}
    tensors = label(exchange.state_dict(), comm.rank)
    return RankState(**about, rank=comm.rank, size=comm.size, tensors=tensors)  # type: ignore[typeddict-item]


def reloaded(states: Sequence[RankState], spec: str, steps: int = 0) -> list[tuple[RankState, Tensor]]:
    """The states of these ranks, loaded, after some steps with no gradient; and the sum of their means."""

    def play(comm: Loopback) -> tuple[RankState, Tensor]:
        exchange, prefix = exchange_on(comm, spec), f"rank{comm.rank}/"
        tensors = states[comm.rank]["tensors"]
        exchange.load_state_dict({key.removeprefix(prefix): value for key, value in tensors.items()}, step=3)
        means = [one_step(exchange, torch.zeros(MODEL.numel), [MODEL])[0] for _ in range(steps)]
        return saved(comm, exchange, spec), sum(means, torch.zeros(MODEL.numel))

    return everywhere(len(states), play)
