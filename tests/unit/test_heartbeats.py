"""Who is alive, and who forms the next group: ranks as threads over one real store."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from laconic.core.errors import PeerError
from laconic.strategies.membership.heartbeats import Heartbeats

DEAD_S = 1.0


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def rosters(store, request):
    """Three ranks that beat."""
    clients = [TCPStore("127.0.0.1", store.port) for _ in range(3)]
    made = [Heartbeats.of(client, request.node.name, rank, 3, DEAD_S) for rank, client in enumerate(clients)]
    yield made
    for heartbeats in made:
        heartbeats.close()


def regrouped(rosters, timeout_s=30.0):
    """All of them at once; what each answers."""
    with ThreadPoolExecutor(len(rosters)) as threads:
        return [*threads.map(lambda heartbeats: heartbeats.regroup(timeout_s), rosters)]


def test_all_who_beat_form_the_next_generation(rosters):
    assert regrouped(rosters) == [(0, 1, 2)] * 3
    assert regrouped(rosters) == [(0, 1, 2)] * 3
    assert [heartbeats.generation for heartbeats in rosters] == [2, 2, 2]


def test_a_rank_that_no_longer_beats_is_left_out(rosters):
    rosters[1].close()
    assert regrouped([rosters[0], rosters[2]]) == [(0, 2)] * 2
    assert rosters[0].living() == {0, 2}


def test_one_may_be_alone(rosters):
    rosters[0].close()
    rosters[1].close()
    assert rosters[2].regroup(30.0) == (2,)


def test_a_living_rank_is_waited_for(rosters):
    came = []

    def late():
        time.sleep(2 * DEAD_S)
        came.append(rosters[1].regroup_requested)
        return rosters[1].regroup(30.0)

    with ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(rosters[0].regroup, 30.0), threads.submit(rosters[2].regroup, 30.0)]
        answers.append(threads.submit(late))
        assert [answer.result() for answer in answers] == [(0, 1, 2)] * 3
    assert came == [True]


def test_who_was_taken_for_dead_comes_back_with_the_next_generation(rosters, store, request):
    rosters[1].close()
    assert regrouped([rosters[0], rosters[2]]) == [(0, 2)] * 2
    back = Heartbeats.of(TCPStore("127.0.0.1", store.port), request.node.name, 1, 3, DEAD_S)
    waiting = threading.Thread(target=back.regroup, args=(30.0,))
    waiting.start()
    deadline = time.monotonic() + 20
    while not rosters[0].regroup_requested and time.monotonic() < deadline:
        time.sleep(0.05)
    assert regrouped([rosters[0], rosters[2]]) == [(0, 1, 2)] * 2
    waiting.join()
    assert back.members == (0, 1, 2)
    back.close()


def test_whoever_beats_and_never_comes_ends_the_waiting(rosters):
    with pytest.raises(PeerError, match=r"ranks \[1, 2\] are alive, but did not join"):
        rosters[0].regroup(1.5)
