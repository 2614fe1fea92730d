"""The autotuner counts what an exchange takes from the rest of a step, but not what cold memory takes."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.unit.test_autotune import RATES, Rank, decided, noise

from laconic.comm.loopback import Loopback
from laconic.reducers.autotune import autotuner
from laconic.reducers.autotune.autotuner import Autotuner


class Burdened(Rank):
    """A rank whose step t takes `burden(candidate, t)` longer."""

    def __init__(self, comm, rate, burden):
        super().__init__(comm, rate)
        self._burden = burden

    def step(self, gradient, bad=False):
        means, took = super().step(gradient, bad)
        more = self._burden(self.bound.autotuner.current, self.steps - 1)
        self.main += more
        return means, took + more


def chosen(rate, burden):
    found = Loopback.run(2, lambda comm: decided(Burdened(comm, RATES[rate], burden)))
    assert found[0] == found[1]
    return found[0]


def test_interference_counts():
    """A candidate that slows backward is not taken, be it a lossy one or the dense one."""
    assert chosen("hidden", lambda candidate, step: 0.0) == 0
    assert chosen("hidden", lambda candidate, step: 0.02 if candidate == 0 else 0.0) == 1
    usual = chosen("middling", lambda candidate, step: 0.0)
    assert usual > 0
    assert chosen("middling", lambda candidate, step: 0.02 if candidate == usual else 0.0) != usual


@pytest.mark.parametrize(("slow_steps", "kept"), [(autotuner.COLD, True), (autotuner.COLD + 2, False)])
def test_the_first_steps_of_a_candidate_do_not_count(slow_steps, kept):
    def body(comm):
        first = {}

        def burden(candidate, step):
            return 0.5 if candidate == 5 and step < first.setdefault(candidate, step) + slow_steps else 0.0

        return decided(Burdened(comm, RATES["slow"], burden))

    assert [chosen == 5 for chosen in Loopback.run(2, body)] == [kept] * 2


def test_steps_that_are_slow_now_and_then_are_no_other_link(caplog):
    """Two exchanges of three begin to take four times as long; the third tells that the link is as it was."""

    def body(comm):
        rank = Rank(comm, RATES["slow"])
        before = decided(rank)
        for step in range(8 * autotuner.WINDOW):
            busy = step >= 4 * autotuner.WINDOW and step % 3 > 0
            rank.link.bytes_a_second = RATES["slow"] / (4 if busy else 1)
            rank.step(noise)
        return before, rank.chosen

    with caplog.at_level(logging.INFO, "laconic"):
        found = Loopback.run(2, body)
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]
    assert "tried again" not in caplog.text


class Script:
    """One rank's autotuner whose candidates' steps take the seconds that it is told, most of it exchange."""

    def __init__(self, seconds, **settings):
        self.now, self.step, self.seconds = 0.0, 0, seconds
        names = [f"c{i}" for i in range(len(seconds))]
        given = {"slack": 0.05, "every": 10**6} | settings
        self.autotuner = Autotuner(names, Loopback.world(1)[0], clock=lambda: self.now, **given)

    def run(self, steps):
        """The candidates in use, step by step."""
        used = []
        for _ in range(steps):
            self.autotuner.begin(self.step, torch.device("cpu"))
            used.append(self.autotuner.current)
            took = self.seconds[self.autotuner.current]
            self.autotuner.note(self.now, self.now + 0.5 * took)
            self.now += took
            self.step += 1
        return used


TRIED = autotuner.COLD + autotuner.COUNTED


def test_it_starts_dense_and_goes_on_from_what_sends_least():
    script = Script([1.0, 0.8, 0.6, 0.5])
    used = script.run(4 * TRIED + 2)
    assert used == [0] * TRIED + [3] * TRIED + [2] * TRIED + [1] * TRIED + [3] * 2


def test_no_candidate_is_tried_after_one_that_takes_three_times_as_long():
    script = Script([1.0, 0.1, 0.7, 0.2])
    used = script.run(3 * TRIED + 1)
    assert used[-TRIED - 1 :] == [2] * TRIED + [3]


@pytest.mark.parametrize(("now_s", "kept"), [(1.04, 0), (1.09, 0), (1.11, 2)])
def test_the_one_in_use_is_given_twice_the_slack(now_s, kept):
    """Dense was kept; in the next search the last candidate takes 1 s, and dense so much."""
    script = Script([1.0, 2.0, 1.0], every=autotuner.WINDOW)
    script.run(3 * TRIED + 1)
    assert script.autotuner.chosen == 0
    script.seconds = [now_s, 2.0, 1.0]
    script.run(2 * autotuner.WINDOW + 3 * TRIED + 1)
    assert script.autotuner.chosen == kept


def test_less_compression_is_taken_as_soon_as_it_is_within_the_slack():
    """Else a link that recovers would be compressed for ever."""
    script = Script([2.0, 2.0, 1.0], every=autotuner.WINDOW)
    script.run(3 * TRIED + 1)
    assert script.autotuner.chosen == 2
    script.seconds = [1.04, 2.0, 1.0]
    script.run(2 * autotuner.WINDOW + 3 * TRIED + 1)
    assert script.autotuner.chosen == 0


def test_changes_that_lead_to_nothing_are_looked_at_less_and_less_often():
    """Every exchange takes twice as long as before, then half of that, for ever: dense stays the fastest."""
    script, waited = Script([0.1, 0.8]), []
    script.run(2 * TRIED + autotuner.WINDOW)
    for slower in (2.0, 0.5) * 3:
        script.seconds = [each * slower for each in script.seconds]
        waited.append(0)
        while script.run(1) == [0]:
            waited[-1] += 1
        script.run(TRIED + autotuner.WINDOW - 1)
    windows = [(each - TRIED) // autotuner.WINDOW for each in waited]
    assert windows == [2, 4, 8, 16, 16, 16]
