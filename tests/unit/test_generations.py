"""Who is alive, and who forms the next group: ranks as threads over one real store."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from tests.dist.commands import soon
from tests.unit.shared import refuses
from torch.distributed import Store, TCPStore

from laconic.core.errors import PeerError
from laconic.strategies.membership.generations import Generations

DEAD_S, LONG_S = 2.0, 15.0  # a thread of a busy machine may have to wait this long
SOME_END = pytest.mark.parametrize("rosters", [DEAD_S], indirect=True)  # and are soon taken for dead


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def rosters(store, request):
    """Three ranks that beat."""
    clients, dead_s = [TCPStore("127.0.0.1", store.port) for _ in range(3)], getattr(request, "param", LONG_S)
    made = [Generations.of(client, request.node.name, rank, 3) for rank, client in enumerate(clients)]
    for heartbeats in made:
        heartbeats.dead_after_s = dead_s
    yield made
    for heartbeats in made:
        heartbeats.close()


WHY = "a test"


def regrouped(rosters, grace_s=30.0):
    """All of them at once; what each answers."""
    with ThreadPoolExecutor(len(rosters)) as threads:
        return [*threads.map(lambda heartbeats: heartbeats.regroup(WHY, grace_s, 30.0), rosters)]


def test_all_who_beat_form_the_next_generation(rosters):
    assert regrouped(rosters) == [(0, 1, 2)] * 3
    assert regrouped(rosters) == [(0, 1, 2)] * 3
    assert [heartbeats.generation for heartbeats in rosters] == [2, 2, 2]


@SOME_END
def test_a_rank_that_no_longer_beats_is_left_out(rosters):
    rosters[1].close()
    assert regrouped([rosters[0], rosters[2]]) == [(0, 2)] * 2
    deadline = time.monotonic() + 20
    while 1 in rosters[0].living() and time.monotonic() < deadline:  # rank 2 may have looked before it
        time.sleep(0.05)
    assert rosters[0].living() == {0, 2}


def test_ages_end_at_the_last_look_as_this_process_may_have_been_stopped(rosters):
    for heartbeats in rosters:
        heartbeats.close()
    look = rosters[0]._last_look
    rosters[0]._beats = {1: (1, look - 0.6 * LONG_S), 2: (1, look - 1.1 * LONG_S)}
    with mock.patch.object(time, "monotonic", return_value=look + 0.6 * LONG_S):
        living = rosters[0].living()
    assert living == {0, 1}


@SOME_END
def test_one_may_be_alone(rosters):
    rosters[0].close()
    rosters[1].close()
    assert rosters[2].regroup(WHY, 30.0, 30.0) == (2,)


def test_a_living_rank_is_waited_for(rosters):
    came = []

    def late():
        count = rosters[0]._beats[1][0]
        while rosters[0]._beats[1][0] < count + 4:  # about a second
            time.sleep(0.05)
        came.append(rosters[1].regroup_requested)
        return rosters[1].regroup(WHY, 30.0, 30.0)

    with ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(rosters[rank].regroup, WHY, 30.0, 30.0) for rank in (0, 2)]
        answers.append(threads.submit(late))
        assert [answer.result() for answer in answers] == [(0, 1, 2)] * 3
    assert came == [True]


@SOME_END
def test_who_was_taken_for_dead_comes_back_with_the_next_generation(rosters, store, request):
    rosters[1].close()
    assert regrouped([rosters[0], rosters[2]]) == [(0, 2)] * 2
    back = Generations.of(TCPStore("127.0.0.1", store.port), request.node.name, 1, 3)
    deadline = time.monotonic() + 20
    with ThreadPoolExecutor(1) as thread:
        members = thread.submit(back.regroup, WHY, 30.0, 30.0)
        while rosters[0].members != (0, 1, 2) and time.monotonic() < deadline:
            if rosters[0].regroup_requested:  # again, if its first heartbeat was late
                assert {*regrouped([rosters[0], rosters[2]])} <= {(0, 1, 2), (0, 2)}
            time.sleep(0.05)
        assert members.result() == rosters[0].members == rosters[2].members == (0, 1, 2)
    assert rosters[0].why == back.why == "rank 1 was excluded, or is a new process, and rejoins"
    back.close()


def test_whoever_beats_and_does_not_come_is_left_out(rosters):
    """Its thread goes on while its training hangs."""
    assert regrouped(rosters[1:], 0.5) == [(1, 2)] * 2
    assert rosters[1].living() == {0, 1, 2} and rosters[1].why == WHY


def test_a_few_wait_longer_for_the_many_that_beat(rosters):
    """One rank of three takes the others for late, and not itself for the group."""
    with ThreadPoolExecutor(2) as threads:
        early = threads.submit(rosters[0].regroup, WHY, 0.1, 30.0)
        time.sleep(1.0)
        assert not early.done()
        second = threads.submit(rosters[1].regroup, WHY, 30.0, 30.0)
        assert early.result() == second.result() == (0, 1)  # two of three: they wait no longer for the third


@SOME_END
def test_who_was_left_out_never_goes_on_alone(rosters):
    """The others may have ended, or be in a training of their own."""
    assert regrouped(rosters[1:], 0.5) == [(1, 2)] * 2
    with pytest.raises(PeerError, match=r"rank 0 .* continued without it .*\[1, 2\] do not readmit it"):
        rosters[0].regroup(WHY, 0.5, 1.0)
    for heartbeats in rosters[1:]:
        heartbeats.close()
    refuses(PeerError, "their training has ended", lambda: rosters[0].regroup(WHY, 0.5, 30.0))


@SOME_END
def test_a_rank_beats_again_once_the_store_answers(rosters):
    """The thread may wait for a lost connection much longer than the rank itself."""
    rank, answers = rosters[1], threading.Event()
    lost, beat = rank._thread_store, rank._beat

    def waiting(store: Store) -> None:
        if store is lost:
            answers.wait(60)
        beat(store)

    rank._beat = waiting
    assert soon(lambda: 1 not in rosters[0].living())
    assert not rank.regroup_requested  # the store answers
    assert soon(lambda: 1 in rosters[0].living())
    assert rank.living() == {0, 1, 2}
    answers.set()


def slow(rank: Generations, seconds: float) -> None:
    """Let each answer of the store to the thread take so long."""
    ask = rank._ask

    def asked(*given: object) -> object:
        time.sleep(seconds)
        return ask(*given)

    rank._ask = asked


def test_a_slow_store_is_no_lost_connection(rosters):
    """Also if a look at all ranks takes longer than a quarter of the limit."""
    rank = rosters[0]
    connection, looked = rank._thread_store, rank._last_look
    slow(rank, 0.2 * LONG_S / 4)
    assert soon(lambda: rank.regroup_requested or rank._last_look > looked + LONG_S / 4)
    assert rank._thread_store is connection


@SOME_END
def test_a_slow_store_hides_no_dead_rank(rosters):
    slow(rosters[0], 0.15)
    rosters[1].close()
    assert soon(lambda: rosters[0].regroup_requested or 1 not in rosters[0].living())
    assert rosters[0].living() == {0, 2}


def test_a_step_waits_for_no_distant_store(rosters):
    """The thread's answer is enough, in every generation, while it is recent."""
    rank = rosters[1]
    for _ in range(2):
        assert soon(lambda: not rank._is_old(rank._requested_at))
        with mock.patch.object(rank, "_store", None), ThreadPoolExecutor(1) as thread:
            assert not rank.regroup_requested
            others = thread.submit(regrouped, [rosters[0], rosters[2]])
            assert soon(lambda: rank.regroup_requested)
            rank._store = rosters[0]._store.clone()
            assert rank.regroup(WHY, 30.0, 30.0) == (0, 1, 2)
            assert others.result() == [(0, 1, 2)] * 2
        assert not rank.regroup_requested


@SOME_END
def test_a_resumed_rank_asks_the_store_itself(rosters):
    """Its thread's answer is older than what happened while it was stopped."""
    rank = rosters[1]
    assert soon(lambda: not rank._is_old(rank._requested_at))
    rank.close()
    assert not rank.regroup_requested
    rosters[0]._store.set("1/called", WHY)
    assert soon(lambda: rank.regroup_requested)


def test_without_its_store_a_rank_ends_with_an_error():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone = Generations.of(TCPStore("127.0.0.1", store.port), "gone", 0, 1)
    del store
    for act in (lambda: alone.regroup_requested, lambda: alone.regroup(WHY, 1.0, 1.0)):
        refuses(PeerError, r"rank 0: the store, .* is gone", act)
    alone.close()


@SOME_END
def test_fewer_than_the_quorum_do_not_go_on(rosters):
    rosters[1].close()
    rosters[2].close()
    with pytest.raises(PeerError, match=r"only ranks \[0\] of 3 are left, and quorum=2"):
        rosters[0].regroup(WHY, 0.5, 30.0, quorum=2)


def test_the_quorum_waits_for_who_beats(rosters):
    with ThreadPoolExecutor(2) as threads:
        early = threads.submit(rosters[0].regroup, WHY, 0.1, 30.0, quorum=3)
        other = threads.submit(rosters[2].regroup, WHY, 0.1, 30.0, quorum=3)
        time.sleep(1.0)
        assert not early.done() and not other.done()
        assert rosters[1].regroup(WHY, 0.1, 30.0, quorum=3) == (0, 1, 2)
        assert early.result() == other.result() == (0, 1, 2)
