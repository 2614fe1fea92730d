"""The autotuner counts what an exchange takes from the rest of a step; and what autotune refuses."""

from __future__ import annotations

import logging

import torch
from tests.unit.shared import for_each, refuses
from tests.unit.test_autotune import RATES, Rank, decided, noise

from laconic.comm.loopback import Loopback
from laconic.core.errors import SpecError, StateError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.exchange.method import lift
from laconic.reducers.autotune import CANDIDATES, CHOSEN, Autotune, autotuner
from laconic.reducers.autotune.autotuner import WINDOW, Autotuner
from laconic.reducers.autotune.search import COLD, Search
from laconic.tools.plan.rehearsal import rehearse


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


@for_each("slow_steps, kept", [(COLD, True), (COLD + 2, False)])
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
    assert "searching again" not in caplog.text


class Script:
    """One rank's autotuner whose candidates' steps take the seconds that it is told, most of it exchange."""

    def __init__(self, seconds, every=10**6, last=None, pinned=None):
        self.now, self.step, self.seconds = 0.0, 0, seconds
        names = [f"c{i}" for i in range(len(seconds))]
        search = Search(0.05, len(seconds) - 1 if last is None else last)
        comm = Loopback.world(1)[0]
        self.autotuner = Autotuner(names, comm, search, every, lambda: self.now, pinned)

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


def test_less_compression_is_taken_as_soon_as_more_saves_too_little():
    """Else a link that recovers would be compressed for ever."""
    script = Script([0.8, 0.5, 0.2], every=WINDOW)
    script.run(60)
    assert script.autotuner.chosen == 2
    script.seconds = [0.208, 0.5, 0.2]
    script.run(60)
    assert script.autotuner.chosen == 0


def test_a_slower_link_is_searched_downwards_and_a_faster_one_upwards():
    script = Script([0.4, 0.2, 0.1, 0.1, 0.1])
    script.run(100)
    assert script.autotuner.chosen == 2
    script.seconds = [1.6, 0.8, 0.4, 0.2, 0.2]
    assert 0 not in script.run(60)
    assert script.autotuner.chosen == 3
    script.seconds = [0.1, 0.1, 0.1, 0.1, 0.1]
    assert 4 not in script.run(90)
    assert script.autotuner.chosen == 0


def test_changes_that_lead_to_nothing_are_looked_at_less_and_less_often(caplog):
    """The exchange takes twice as long, then half of that, for ever: dense stays the fastest."""
    script = Script([0.1, 0.8])
    script.run(60)
    waited = []
    for _ in range(5):
        script.seconds = [0.2, 1.6]
        waited.append(0)
        while script.run(1) == [0]:
            waited[-1] += 1
        script.run(30)
        script.seconds = [0.1, 0.8]
        while script.autotuner.usual_s > 0.06:
            script.run(1)
    windows = [each // WINDOW for each in waited]
    assert windows[0] < windows[1] < windows[2] < windows[3]
    assert windows[4] <= 2 * autotuner.MAX_PATIENCE


def test_it_goes_no_further_than_the_lossiest_that_is_allowed():
    assert set(Script([8.0, 4.0, 2.0, 1.0], last=1).run(60)) == {0, 1}
    assert set(Script([8.0, 4.0], last=0).run(60)) == {0}


def test_a_pinned_candidate_is_in_use_from_the_first_step_on(caplog):
    script = Script([1.0, 2.0, 3.0], every=WINDOW, pinned=2)
    with caplog.at_level(logging.INFO, "laconic"):
        assert set(script.run(60)) == {2}
    assert script.autotuner.chosen == 2 and not caplog.text


MODEL = Layout.of([("a", (100, 100)), ("b", (100,))])


def test_a_state_of_more_candidates_is_refused():
    bound = Autotune((CANDIDATES[0],)).bind(MODEL, Loopback.world(1)[0])
    state = bound.state_dict() | {CHOSEN: torch.tensor(3)}
    refuses(StateError, r"has candidate 3, expected 0\.\.0", bound.load_state_dict, state)


@for_each(
    "spec, said",
    [
        ("autotune((sum(dtype='fp16'),))", r"the first of them sum\(\), got"),
        ("autotune(())", r"the first of them sum\(\)"),
        ("autotune((sum(), topk(0.1)))", "a candidate must be a reducer"),
        ("autotune((sum(), scatter_reduce(minmax(), pattern='ring')))", "cannot be a candidate: each hop"),
        ("autotune(gain=1)", "gain must be a number in"),
        (
            "autotune(lossiest=sum(dtype='bf16'))",
            r"lossiest must be one of the candidates .* got sum\(dtype='bf16'",
        ),
        ("auto(pinned=topk(density=0.5))", "pinned must be one of the candidates"),
        ("autotune(every=0)", "every must be a whole number"),
        ("auto((sum(), dgc()))", r"a candidate must be a reducer, codec or selector, got the method dgc\(\)"),
        ("auto('sum()')", "must be a list of reducers, codecs or selectors, got 'sum"),
    ],
)
def test_bad_candidates_are_refused(spec, said):
    refuses(SpecError, said, parse, spec)


@for_each(
    "spec, said",
    [
        ("autotune((sum(), powersgd(rank=1)))", r"must be stateless, powersgd\(.*\) is not"),
        ("autotune((sum(), gather(qsgd(levels=1, block=4096))))", "omega must be below 1"),
    ],
)
def test_candidates_that_cannot_share_a_memory_are_refused_when_bound(spec, said):
    refuses(SpecError, said, lambda: parse(spec).bind(MODEL, Loopback.world(1)[0]))


def test_auto_takes_codecs_and_selectors_for_candidates():
    made = parse("auto((sum(), cast('fp16'), topk(0.01)))")
    candidates = made.routes[0].reducer.candidates
    assert [repr(candidate) for candidate in candidates] == [
        "sum()",
        "gather(cast(dtype='fp16'))",
        "gather(sparse(topk(density=0.01), indices=golomb()))",
    ]
    assert parse(repr(made)) == made


@for_each("spec", ["auto()", "two_level(sum(), autotune(), ranks_per_node=2)"])
def test_what_a_link_decides_is_not_rehearsed(spec):
    refuses(SpecError, "adapts to the link", lambda: next(rehearse([lift(spec)], MODEL)))


def test_by_default_it_stops_at_four_bits() -> None:
    usable = lift("auto()").routes[0].reducer.usable
    assert usable == CANDIDATES[:4] and repr(usable[-1]) == "scatter_reduce(minmax(block=128))"
    assert lift("auto(lossiest=sampled_topk(density=0.001))").routes[0].reducer.usable == CANDIDATES
    given = "auto((sum(), gather(sparse(topk(density=0.1)))))"
    assert len(lift(given).routes[0].reducer.usable) == 2


def test_a_skipped_step_changes_no_decision_and_no_search():
    """At every step of searches, their ends and their beginnings, and of windows: state and search are again
    what they were. The next steps then go as in a run without the skipped one, but for one observation."""
    names = (
        "current",
        "chosen",
        "usual_s",
        "windows",
        "_strange",
        "_patience",
        "_changed",
        "_looked",
    )

    def state(script):
        return {name: getattr(script.autotuner, name) for name in names} | {
            "steps": list(script.autotuner._steps),
            "measured": script.autotuner._trial and script.autotuner._search.measured(),
            "warm": set(script.autotuner._search.warm),
            "trial": script.autotuner._trial is None,
        }

    changed = set()
    for when in range(1, 75):
        script = Script([0.4, 0.2, 0.1, 0.1], every=2 * WINDOW)
        script.run(when)
        before = state(script)
        script.run(1)
        during = state(script)
        changed |= {name for name in before if before[name] != during[name]}
        script.autotuner.put_back()
        after = state(script)
        assert after == before, (when, {k: (before[k], after[k]) for k in before if before[k] != after[k]})
        script.run(100)
        assert script.autotuner.chosen == 2, when
    assert {"current", "chosen", "usual_s", "windows", "steps", "measured", "trial"} <= changed
