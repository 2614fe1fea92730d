"""A trial sees what an exchange takes from the rest of a step, but not what untouched memory takes."""

from __future__ import annotations

from tests.unit.test_ladder import BUCKETS, RATES, Rank, decided

from laconic.comm.loopback import Loopback
from laconic.reducers import trial


class Burdened(Rank):
    """A rank whose step t takes `burden(rung, t)` longer."""

    def __init__(self, comm, rate, burden):
        super().__init__(comm, rate)
        self._burden = burden

    def step(self, gradient, bad=False):
        means, took = super().step(gradient, bad)
        more = self._burden(self.bound.trial.rung(BUCKETS[0].names), self.steps - 1)
        self.main += more
        return means, took + more


def plan(rate, burden):
    found = Loopback.run(2, lambda comm: decided(Burdened(comm, RATES[rate], burden)))
    assert found[0] == found[1]
    return found[0]


def test_a_rung_that_slows_backward_is_not_taken():
    assert plan("fast", lambda rung, step: 0.0) == (0, 0, 0)
    assert plan("fast", lambda rung, step: 0.02 if rung == 0 else 0.0) == (1, 1, 1)


def test_the_first_steps_of_all_do_not_count(monkeypatch):
    """They are those of the rung that sends least, and would make it look slow."""

    def cold(rung, step):
        return 0.5 if step < 1 + trial.WARM_UP else 0.0

    assert plan("slow", cold) == (5, 5, 5)
    monkeypatch.setattr(trial, "COLD", 0)
    monkeypatch.setattr(trial, "WARM_UP", 0)
    assert plan("slow", lambda rung, step: 0.5 if step < 4 else 0.0) != (5, 5, 5)
