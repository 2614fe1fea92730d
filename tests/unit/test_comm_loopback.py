"""Loopback against the plain meaning of each collective, and what a failing rank does to the others."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tests.unit.shared import for_each, refuses

from laconic.comm.loopback import Loopback
from laconic.core.errors import PeerError, WireError

SIZES = (1, 2, 4, 5)


@for_each("size", SIZES)
def test_all_reduce_sums_in_rank_order(size):
    given = torch.randn(size, 1001, generator=torch.Generator().manual_seed(size))
    total = given[0].clone()
    for row in given[1:]:
        total += row

    def body(comm):
        x = given[comm.rank].clone()
        return comm.all_reduce(x) is x and torch.equal(x, total)

    assert all(Loopback.run(size, body))


@for_each("size", SIZES)
def test_max_and_min_are_in_place_and_all_gather_takes_ragged_sizes_and_gives_private_memory(size):
    def body(comm):
        x, least = torch.tensor([comm.rank]), torch.tensor([comm.rank])
        assert comm.all_reduce(x, "max") is x and comm.all_reduce(least, "min") is least
        came = comm.all_gather(torch.full((comm.rank,), comm.rank))
        for tensor in came:
            tensor += 100
        return x.item(), least.item(), [tensor.tolist() for tensor in came]

    assert Loopback.run(size, body) == [(size - 1, 0, [[r + 100] * r for r in range(size)])] * size


@for_each("size", SIZES)
def test_all_to_all_and_reduce_scatter(size):
    def body(comm):
        chunks = [torch.full((to + 1,), 10.0 * comm.rank + to) for to in range(size)]
        return comm.all_to_all(chunks), comm.reduce_scatter(chunks)

    for rank, (came, total) in enumerate(Loopback.run(size, body)):
        assert [c.tolist() for c in came] == [[10.0 * r + rank] * (rank + 1) for r in range(size)]
        assert total.tolist() == [sum(10.0 * r + rank for r in range(size))] * (rank + 1)


def test_broadcast_and_exchange():
    def body(comm):
        x = comm.broadcast(torch.tensor([float(comm.rank)]), root=2)
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        came = torch.empty(1)
        comm.exchange({after: torch.tensor([float(comm.rank)])}, {before: came})
        return x.item(), came.item()

    assert Loopback.run(4, body) == [(2.0, 3.0), (2.0, 0.0), (2.0, 1.0), (2.0, 2.0)]


def test_split_keeps_rank_order_and_splits_again():
    def body(comm):
        half = comm.split(comm.rank % 2)
        alone = half.split(half.rank)
        return half.rank, half.size, half.all_reduce(torch.tensor([comm.rank])).item(), alone.size

    assert Loopback.run(5, body) == [(0, 3, 6, 1), (0, 2, 4, 1), (1, 3, 6, 1), (1, 2, 4, 1), (2, 3, 6, 1)]


def test_the_first_exception_frees_all_and_names_its_rank():
    def body(comm):
        if comm.rank == 1:
            raise WireError("seven bytes too many")
        comm.split(comm.rank % 2).all_reduce(torch.ones(1))

    start = time.perf_counter()
    refuses(WireError, "rank 1: seven bytes too many", Loopback.run, 4, body)
    assert time.perf_counter() - start < 10


def test_an_exception_is_raised_rather_than_its_quotation():
    quoted = threading.Event()

    def fail(comm: Loopback) -> None:
        if comm.rank == 1:
            quoted.set()
            raise PeerError("rank 0 failed: KeyError: 'no such file'")
        assert quoted.wait(10)
        time.sleep(0.1)
        raise KeyError("no such file")

    with pytest.raises(KeyError, match="rank 0: 'no such file'"):
        Loopback.run(2, fail)


def test_a_rank_that_never_comes_is_waited_for_only_so_long():
    def body(comm):
        if comm.rank:
            comm.all_reduce(torch.ones(1))

    refuses(PeerError, r"not all 2 ranks arrived within 0\.2 s", Loopback.run, 2, body, timeout_s=0.2)


def test_different_collectives_at_once_are_an_error():
    def body(comm):
        return comm.all_gather(torch.ones(1)) if comm.rank else comm.all_reduce(torch.ones(1))

    refuses(PeerError, "while another calls", Loopback.run, 2, body)


def test_chunks_must_be_one_a_rank():
    with pytest.raises(ValueError, match="chunks must be 2, one per rank, got 1"):
        Loopback.run(2, lambda comm: comm.all_to_all([torch.ones(1)]))


@for_each("other", [torch.ones(1), torch.ones(3, dtype=torch.float64)])
def test_shapes_and_dtypes_must_agree(other):
    def reduce(comm):
        comm.all_reduce(other.clone() if comm.rank else torch.ones(3))

    def exchange(comm):
        peer = 1 - comm.rank
        comm.exchange({peer: torch.ones(3)}, {peer: other.clone()})

    for body in (reduce, exchange):
        refuses(PeerError, "disagree", Loopback.run, 2, body)
