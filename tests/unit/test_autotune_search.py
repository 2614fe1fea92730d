"""A search over virtual clocks: it is rarely wrong however much steps differ, and short where they do not."""

from __future__ import annotations

import random

import pytest

from laconic.reducers.autotune.search import FEW, LESS, LONG_S, MORE, WAIT_S, Search, Timed

JITTER = 0.2  # standard deviation, of a step
NOTHING_PAYS = {
    "all alike": [1.0] * 6,
    "lossier ones a little slower": [1.0, 1.01, 1.02, 1.03, 1.03, 1.03],
}
SOMETHING_PAYS = {  # the part of a dense step that is exchange: half, four fifths, nearly all
    "half": [1.0, 0.75, 0.625, 0.5625, 0.51, 0.501],
    "four fifths": [1.0, 0.6, 0.4, 0.3, 0.22, 0.202],
    "nearly all": [1.0, 0.515, 0.2725, 0.15, 0.04, 0.03],
    "halves do not": [1.0, 1.02, 0.5, 0.52, 0.25, 0.26],
}


def searched(seconds, jitter=0.0, seed=0, used=0, ways=(MORE,), exchange=0.5, gain=0.05, ranks=2):
    """The candidate kept, and those that were in use, step by step."""
    rng = random.Random(seed)
    run = Search(gain, len(seconds) - 1).run(used, ways)
    in_use = [next(run)]
    while True:
        draws = [max(0.2, rng.gauss(1, jitter)) for _ in range(ranks)]
        took = seconds[in_use[-1]] * max(draws)
        try:
            in_use.append(run.send(Timed(exchange * took, took)))
        except StopIteration as end:
            return end.value, in_use


@pytest.mark.parametrize("seconds", NOTHING_PAYS.values(), ids=NOTHING_PAYS)
def test_where_nothing_pays_at_most_2_runs_in_100_end_lossy(seconds):
    assert sum(searched(seconds, JITTER, seed)[0] > 0 for seed in range(100)) <= 2


@pytest.mark.parametrize("seconds", SOMETHING_PAYS.values(), ids=SOMETHING_PAYS)
def test_where_something_pays_98_runs_in_100_end_within_a_tenth_of_the_best(seconds):
    kept = [seconds[searched(seconds, JITTER, seed)[0]] for seed in range(50)]
    assert sum(each <= 1.1 * min(seconds) for each in kept) >= 49


def test_from_a_lossy_candidate_it_comes_back_where_nothing_pays():
    found = [searched([1.0] * 6, JITTER, seed, used=5, ways=(LESS,))[0] for seed in range(20)]
    assert found.count(0) >= 19


@pytest.mark.parametrize("seconds", [*NOTHING_PAYS.values(), *SOMETHING_PAYS.values()])
def test_steps_that_take_the_same_time_need_a_short_search(seconds):
    kept, in_use = searched(seconds)
    assert seconds[kept] <= 1.1 * min(seconds)
    assert len(in_use) <= 75


def test_it_starts_with_what_loses_nothing_and_goes_down_while_each_pays():
    _, in_use = searched([1.0, 0.6, 0.4, 0.3, 0.3, 0.3])
    firsts = list(dict.fromkeys(in_use))
    assert firsts == [0, 1, 2, 3, 4, 5]
    _, in_use = searched([1.0, 1.0, 1.0, 0.3, 0.2, 0.1])
    assert set(in_use) == {0, 1, 2}, "two running that do not pay end it"


def test_an_exchange_that_is_a_small_part_of_a_step_needs_no_search():
    kept, in_use = searched([1.0] * 6, exchange=0.04)
    assert kept == 0 and set(in_use) == {0}


@pytest.mark.parametrize(("gain", "kept"), [(0.05, 2), (0.25, 1), (0.6, 0)])
def test_each_step_down_must_save_the_least_gain(gain, kept):
    assert searched([1.0, 0.5, 0.4], gain=gain)[0] == kept


def test_what_sends_a_small_part_of_the_gradient_must_save_twice_as_much():
    def kept(*seconds):
        run, took = Search(0.05, 1, twice=[1]).run(0, (MORE,)), 0.0
        candidate = next(run)
        while True:
            took = seconds[candidate]
            try:
                candidate = run.send(Timed(0.5 * took, took))
            except StopIteration as end:
                return end.value

    assert [kept(1.0, 0.92), kept(1.0, 0.88)] == [0, 1]


@pytest.mark.parametrize(("dense_s", "steps"), [(4 * WAIT_S, 1), (4 * LONG_S, FEW)])
def test_a_slow_link_carries_few_dense_gradients(dense_s, steps):
    _, in_use = searched([dense_s, dense_s / 2, dense_s / 4, dense_s / 8, 0.2, 0.2], exchange=0.9)
    assert in_use.count(0) == steps
    assert in_use.count(1) == steps


@pytest.mark.parametrize("when", [30, 100, 300])
def test_a_link_that_drops_during_a_search_is_seen_in_it(when):
    """Nothing pays, for so many steps, which jitter; then nearly all of a step is exchange."""
    rng = random.Random(when)
    before, after = NOTHING_PAYS["all alike"], SOMETHING_PAYS["nearly all"]
    run = Search(0.05, 5).run(0, (MORE,))
    in_use, kept = [next(run)], None
    while kept is None:
        seconds = before if len(in_use) < when else [10 * each for each in after]
        took = seconds[in_use[-1]] * rng.gauss(1, JITTER)
        try:
            in_use.append(run.send(Timed(0.5 * took, took)))
        except StopIteration as end:
            kept = end.value
    assert kept == 5
    assert all(each > 3 for each in in_use[when + 50 :])


def test_steps_apart_do_not_count():
    """Dense ones that also send what others left behind take longer, and say nothing about the dense one."""
    run = Search(0.05, 1).run(0, (MORE,))
    in_use, before = [next(run)], 0
    kept = None
    while kept is None:
        now = in_use[-1]
        apart = now == 0 and before == 1
        before = now
        try:
            in_use.append(run.send(Timed(0.5, 1.5 if apart else 1.0, apart)))
        except StopIteration as end:
            kept = end.value
    assert kept == 0
