"""The laws of methods: each holds for every one that is registered, and for every reducer lifted to one."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from laconic.comm.loopback import Loopback
from laconic.exchange.method import lift
from tests.cases import over

from .method_ranks import BUCKETS, Rank
from .table import compressors, first_of_each, same
from .worlds import MODEL, gradient, one_step

SPECS = compressors()
FIRST = first_of_each(SPECS)
SIZES = (1, 4)  # two ranks: those that resume
STEPS = 4
each = over(spec=SPECS)


def beginnings(spec: str) -> set[int]:
    """Where a training may begin: at its first step, and shortly before the end of its warm-up."""
    return {0, max(0, lift(spec).warm_at - 2)}


@over(spec=SPECS, size=SIZES)
def test_replicas_are_bit_identical(spec: str, size: int) -> None:
    """After every step, or, where a method says so, after it has been removed."""

    def play(comm: Loopback, begin: int) -> tuple[list[Tensor], Tensor]:
        rank, seen = Rank(spec, comm, begin), []
        for step in range(begin, begin + STEPS):
            rank.train([step])
            seen.append(rank.flat)
        rank.close()
        return seen, rank.flat

    for begin in beginnings(spec):
        seen, ends = zip(*Loopback.run(size, lambda comm, begin=begin: play(comm, begin)), strict=True)
        assert all(same(end, ends[0]) for end in ends) and bool(ends[0].isfinite().all())
        assert begin or not torch.equal(seen[0][0], seen[0][-1]), "it trains"
        if lift(spec).keeps_equal:
            assert all(same(a, b) for other in seen for a, b in zip(seen[0], other, strict=True))


@each
def test_resumed_is_never_stopped(spec: str) -> None:
    """The same bits; where clocks decide what is sent, replicas that are still alike."""

    def play(comm: Loopback, begin: int) -> tuple[Tensor, Tensor]:
        whole, first, second = Rank(spec, comm, begin), Rank(spec, comm, begin), Rank(spec, comm)
        stop, end = begin + STEPS // 2, begin + STEPS
        whole.train(range(begin, end))
        first.train(range(begin, stop))
        second.take_over(first)
        second.train(range(stop, end))
        return whole.flat, second.flat

    for begin in beginnings(spec):
        found = Loopback.run(2, lambda comm, begin=begin: play(comm, begin))
        assert all(same(whole, resumed) for whole, resumed in found) or lift(spec).adaptive
        if lift(spec).keeps_equal:
            assert all(same(resumed, found[0][1]) for _, resumed in found)


@over(spec=FIRST)
def test_what_is_discarded_never_comes_back(spec: str) -> None:
    """After gradients that are thrown away come gradients of zero, and means of zero at once; without
    `discard` these are not zero only where a method says that it holds back."""

    def play(comm: Loopback, discard: bool) -> tuple[bool, bool]:
        exchange = Rank(spec, comm, lift(spec).warm_at).exchange
        for t in range(2):
            one_step(exchange, gradient(comm.rank, t), BUCKETS)
        if discard:
            exchange.discard()
        silent = True
        for _ in range(4):
            mean, _ = one_step(exchange, torch.zeros(MODEL.numel), BUCKETS)
            silent &= not bool(mean.any())
        return silent, exchange.holds_back

    for silent, _ in Loopback.run(2, lambda comm: play(comm, True)):
        assert silent
    for silent, holds_back in Loopback.run(2, lambda comm: play(comm, False)):
        assert silent or holds_back


@over(specs=pairwise([*FIRST, FIRST[0]]))
def test_two_methods_side_by_side_do_not_disturb_each_other(specs: tuple[str, str]) -> None:
    """In turns, on two groups of the same ranks: each has the bits that it has alone."""

    def play(comm: Loopback) -> list[bool]:
        alone, beside = ([Rank(spec, comm) for spec in specs] for _ in range(2))
        for rank in alone:
            rank.train(range(3))
        for step in range(3):
            for rank in beside:
                rank.train([step])
        return [same(a.flat, b.flat) or a.method.adaptive for a, b in zip(alone, beside, strict=True)]

    assert Loopback.run(2, play) == [[True, True]] * 2
