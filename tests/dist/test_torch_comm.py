"""TorchComm over gloo in real processes, against the plain meaning of each collective."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from laconic.comm.torch_comm import TorchComm
from laconic.comm.wire_model import SHORT
from laconic.core.errors import PeerError
from tests.dist.pool import on_ranks

SIZES = (1, 2, 3, 4)


def given(rank: int, n: int = 1001) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank))


def reduce_all():
    comm = TorchComm()
    x = given(comm.rank)
    assert comm.all_reduce(x) is x
    strided = given(comm.rank, 2002)[::2].clone().repeat(2, 1).T[:, 0]
    comm.all_reduce(strided)
    largest = comm.all_reduce(torch.tensor([comm.rank]), "max").item()
    smallest = comm.all_reduce(torch.tensor([comm.rank]), "min").item()
    comm.all_reduce(torch.empty(0))
    return x, strided, largest, smallest


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce(pool, size):
    results = pool.run(size, reduce_all)
    plain = sum(given(rank) for rank in range(size))
    spread = sum(given(rank, 2002)[::2] for rank in range(size))
    for x, strided, largest, smallest in results:
        assert torch.equal(x, results[0][0])
        torch.testing.assert_close(x, plain, rtol=1e-5, atol=1e-5)  # added up in another order
        torch.testing.assert_close(strided, spread, rtol=1e-5, atol=1e-5)
        assert (largest, smallest) == (size - 1, 0)


def reduce_short(sizes):
    """Sums of these many elements, and of one that is not finite."""
    comm = TorchComm()
    sums = [comm.all_reduce(given(comm.rank, n)) for n in sizes]
    broken = given(comm.rank, 10)
    if comm.rank == 1:
        broken[7] = torch.inf
    return sums, comm.all_reduce(broken)


@pytest.mark.parametrize("size", [3, 4])
def test_short_and_long_sums_are_the_same_on_all_ranks(pool, size):
    """Those of at most SHORT bytes take two rounds, in rank order; fewer elements than ranks do too."""
    sizes = (1, 2, 3, 7, 1000, SHORT // 4, SHORT // 4 + 1)
    results = pool.run(size, reduce_short, sizes)
    for i, n in enumerate(sizes):
        plain = sum((given(rank, n) for rank in range(1, size)), start=given(0, n))
        for sums, broken in results:
            assert torch.equal(sums[i], results[0][0][i])
            assert torch.equal(sums[i], plain) or 4 * n > SHORT
            torch.testing.assert_close(sums[i], plain, rtol=1e-5, atol=1e-5)
            assert broken.isinf().nonzero().flatten().tolist() == [7]


def begin_and_gather(sizes):
    """Sums that are under way while ranks gather messages and sum other things."""
    comm = TorchComm()
    ends = [comm.begin_all_reduce(given(comm.rank, n)) for n in sizes]
    told = comm.all_gather(given(comm.rank, 3 + comm.rank))
    between = comm.all_reduce(given(comm.rank))
    return [end() for end in ends], told, between


@pytest.mark.parametrize("size", SIZES)
def test_sums_go_on_while_others_communicate(pool, size):
    sizes = (5, 1000, SHORT // 4 + 1, 0, 7)
    results = pool.run(size, begin_and_gather, sizes)
    for sums, told, between in results:
        for n, found in zip(sizes, sums, strict=True):
            plain = sum(given(rank, n) for rank in range(size))
            torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(between, sum(map(given, range(size))), rtol=1e-5, atol=1e-5)
        assert all(torch.equal(each, given(rank, 3 + rank)) for rank, each in enumerate(told))


def reduce_in(dtype):
    comm = TorchComm()
    return comm.all_reduce(torch.arange(5).to(dtype))


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64]
)
def test_all_reduce_keeps_the_dtype(pool, dtype):
    for x in pool.run(2, reduce_in, dtype):
        assert x.dtype == dtype and x.tolist() == [0, 2, 4, 6, 8]


def test_int16_is_refused_with_the_way_out(pool):
    with pytest.raises(ValueError, match="gloo cannot reduce int16; use int32"):
        pool.run(2, reduce_in, torch.int16)


@on_ranks(tuple(SIZES))
def test_all_gather_takes_ragged_and_empty_messages():
    size = dist.get_world_size()
    comm = TorchComm()
    came = comm.all_gather(torch.full((comm.rank * 1000,), comm.rank, dtype=torch.uint8))
    assert [each.tolist() for each in came] == [[r] * (1000 * r) for r in range(size)]
    assert all(each.dtype == torch.uint8 for each in came)


def send_chunks():
    comm = TorchComm()
    chunks = [torch.full((3 * to,), 10.0 * comm.rank + to) for to in range(comm.size)]
    return comm.all_to_all(chunks), comm.reduce_scatter(chunks)


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_and_reduce_scatter(pool, size):
    for rank, (came, total) in enumerate(pool.run(size, send_chunks)):
        assert [c.tolist() for c in came] == [[10.0 * r + rank] * (3 * rank) for r in range(size)]
        assert total.tolist() == [sum(10.0 * r + rank for r in range(size))] * (3 * rank)


def broadcast_and_pass_on():
    comm = TorchComm()
    x = comm.broadcast(torch.tensor([float(comm.rank)]), root=2)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    room = torch.zeros(3, 2)
    comm.exchange({after: torch.full((3,), float(comm.rank))}, {before: room[:, 1]})
    return x.item(), room.tolist()


def test_broadcast_and_exchange(pool):
    for rank, (root, room) in enumerate(pool.run(3, broadcast_and_pass_on)):
        assert root == 2.0
        assert room == [[0.0, (rank - 1) % 3]] * 3


def split_twice():
    comm = TorchComm.own()
    half = comm.split(comm.rank % 2)
    again = comm.split(comm.rank % 2)
    alone = half.split(half.rank)
    total = half.all_reduce(torch.tensor([comm.rank])).item() + again.all_reduce(torch.tensor([0])).item()
    own = TorchComm.own(half.group, timeout=timedelta(seconds=20))
    last = own.all_gather(torch.tensor([comm.rank]))[-1].item()
    for each in (own, alone, again, half, comm):
        each.close()
    return half.rank, half.size, total, alone.size, last


def test_own_and_split_make_groups_inside_groups(pool):
    assert pool.run(4, split_twice) == [(0, 2, 2, 1, 2), (0, 2, 4, 1, 3), (1, 2, 2, 1, 2), (1, 2, 4, 1, 3)]


def split_again():
    for _ in range(8):
        comm = TorchComm.own()
        half = comm.split(comm.rank // 2)
        total = half.all_reduce(torch.tensor([comm.rank])).item()
        quarter = half.split(half.rank)
        comm.close()
    return total, quarter.size


def test_a_part_is_made_again_after_it_was_closed(pool):
    """Its name is new: under the old one it would meet the old one's addresses."""
    assert pool.run(4, split_again) == [(1, 1), (1, 1), (5, 1), (5, 1)]


def made_again_of_some():
    world = TorchComm()
    for turn in range(4):
        if world.rank < 3:
            some = TorchComm.among([0, 1, 2], f"some {turn}", like=world)
            again = TorchComm.own(some.group)
            again.split(0).close()
            again.close()
            total = some.all_reduce(torch.tensor([some.rank])).item()
            some.close()
    return total if world.rank < 3 else None


def test_a_group_of_some_is_made_again_after_it_was_closed(pool):
    assert pool.run(4, made_again_of_some) == [3, 3, 3, None]


def lose_a_peer():
    comm = TorchComm.own()
    comm.all_reduce(torch.ones(1))
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        for _ in range(100):
            comm.all_gather(torch.ones(1000 + comm.rank))
    except PeerError as error:
        return str(error), time.monotonic() - start
    return None


def test_a_dead_peer_is_a_peer_error_that_names_rank_and_operation(pool):
    killed, survivor = sorted(pool.fresh(2, lose_a_peer, timeout_s=30), key=lambda each: each.rank != 1)
    assert killed.exit_code == -signal.SIGKILL
    text, seconds = survivor.value
    assert text.startswith("a peer of rank 0 died") and "lengths of 2 ranks" in text
    assert seconds < 20


def close_one(said):
    with said.open("w") as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)  # torch warns from C++
        try:
            TorchComm.own().close()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    return said.read_text()


def test_a_group_of_our_own_is_closed_without_a_word(pool, tmp_path):
    assert pool.run(1, close_one, tmp_path / "said") == [""]


def raise_on(rank):
    if dist.get_rank() == rank:
        raise KeyError("lost")
    TorchComm().all_reduce(torch.ones(1))


def sleep(seconds):
    time.sleep(seconds)


def test_the_pool_raises_the_first_error_and_serves_on(pool):
    with pytest.raises(KeyError, match="rank 1: 'lost'"):
        pool.run(3, raise_on, 1)
    with pytest.raises(Exception, match=r"(?s)rank 0 was not done after 5\.0 s.*in sleep"):
        pool.run(2, sleep, 30, timeout_s=5.0)
    with pytest.raises(Exception, match="exit code 3"):
        pool.run(2, "os:_exit", 3)
    assert pool.run(2, "torch.distributed:get_rank") == [0, 1]
    with pytest.raises(ValueError, match="top of a module"):
        pool.run(2, lambda: None)


def counted():
    comm = TorchComm.own()
    first, second = comm.counter(), comm.counter()
    dist.barrier()
    first.add(1)
    second.add(10)
    dist.barrier()
    seen = first.add(0), second.add(0)
    dist.barrier()
    comm.close()
    return seen


def test_a_counter_is_shared_whatever_a_process_has_counted_before(pool):
    """In a group of the same name; the third process had no part in it."""
    assert pool.run(2, counted) == [(2, 20)] * 2
    assert pool.run(3, counted) == [(3, 30)] * 3
