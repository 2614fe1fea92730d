"""A trial sees what an exchange takes from the rest of a step, but not what untouched memory takes. What it
takes from that is proved by steps."""

from __future__ import annotations

import logging

import pytest
from tests.unit.test_ladder import BUCKETS, RATES, Rank, decided, noise

from laconic.comm.loopback import Loopback
from laconic.reducers import trial


class Burdened(Rank):
    """A rank whose step t takes `burden(rungs, t)` longer, where buckets stand on these rungs."""

    def __init__(self, comm, rate, burden):
        super().__init__(comm, rate)
        self._burden = burden

    def step(self, gradient, bad=False):
        means, took = super().step(gradient, bad)
        more = self._burden({self.bound.trial.rung(bucket.names) for bucket in BUCKETS}, self.steps - 1)
        self.main += more
        return means, took + more


def plan(rate, burden):
    found = Loopback.run(2, lambda comm: decided(Burdened(comm, RATES[rate], burden)))
    assert found[0] == found[1]
    return found[0]


def test_a_rung_that_slows_backward_is_not_taken():
    assert plan("fast", lambda rungs, step: 0.0) == (0, 0, 0)
    assert plan("fast", lambda rungs, step: 0.02 if rungs == {0} else 0.0) == (1, 1, 1)


def test_the_first_steps_of_all_do_not_count(monkeypatch):
    """They are those of the rung that sends least, and would make it look slow."""

    def cold(rungs, step):
        return 0.5 if step < 1 + trial.WARM_UP else 0.0

    assert plan("slow", cold) == (5, 5, 5)
    monkeypatch.setattr(trial, "COLD", 0)
    monkeypatch.setattr(trial, "WARM_UP", 0)
    assert plan("slow", lambda rungs, step: 0.5 if step < 4 else 0.0) != (5, 5, 5)


def test_steps_that_are_slow_now_and_then_are_no_other_link(caplog):
    """Two exchanges of three begin to take four times as long; the third tells that the link is as it was."""

    def body(comm):
        rank = Rank(comm, RATES["slow"])
        plan = decided(rank)
        for step in range(8 * trial.WINDOW):
            busy = step >= 4 * trial.WINDOW and step % 3 > 0
            rank.link.bytes_a_second = RATES["slow"] / (4 if busy else 1)
            rank.step(noise)
        return plan, rank.rungs

    with caplog.at_level(logging.INFO, "laconic"):
        found = Loopback.run(2, body)
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]
    assert "tried again" not in caplog.text


@pytest.mark.parametrize(("longer_s", "rungs"), [(0.0, 2), (0.05, 1)])
def test_a_plan_of_several_rungs_stays_only_where_its_own_steps_bear_it_out(longer_s, rungs, caplog):
    def body(comm):
        rank = Burdened(comm, RATES["middling"], lambda rungs, step: longer_s if len(rungs) > 1 else 0.0)
        reckoned = decided(rank)
        for _ in range(trial.WINDOW + 2):
            rank.step(noise)
        return reckoned, rank.rungs

    with caplog.at_level(logging.INFO, "laconic"):
        found = Loopback.run(2, body)
    assert found[0] == found[1]
    reckoned, proved = found[0]
    assert len({*reckoned}) > 1
    assert len({*proved}) == rungs
    assert ("in truth" in caplog.text) == (rungs == 1)
