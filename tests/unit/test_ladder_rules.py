"""What a ladder refuses, and the law of its plan: within the slack of the best of all plans."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.comm.loopback import Loopback
from laconic.core.errors import SpecError, StateError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.plan.rehearsal import rehearse
from laconic.reducers.ladder import RUNGS, Ladder
from laconic.reducers.timetable import Timetable
from laconic.strategies.method import lift

MODEL = Layout.of([("a", (100, 100)), ("b", (100,))])


def test_a_state_of_a_longer_ladder_is_refused():
    bound = Ladder((RUNGS[0],)).bind(MODEL, Loopback.world(1)[0])
    state = bound.state_dict() | {"once/rung/a": torch.tensor(3)}
    with pytest.raises(StateError, match=r"has rung 3, this ladder 0\.\.0"):
        bound.load_state_dict(state)


@pytest.mark.parametrize(
    "spec, said",
    [
        ("ladder((sum(dtype='fp16'),))", r"the first is sum\(\), got"),
        ("ladder(())", r"the first is sum\(\)"),
        ("ladder((sum(), topk(0.1)))", "a rung must be a reducer"),
        ("ladder((sum(), scatter_reduce(minmax(), pattern='ring')))", "can be no rung, as each hop"),
        ("ladder(slack=-1)", "slack must be a number in"),
        ("ladder(every=0)", "every must be a whole number"),
        ("auto((sum(), dgc()))", r"a rung is a reducer, codec or selector, got the method dgc\(\)"),
        ("auto('sum()')", "are a list of reducers, codecs or selectors, got 'sum"),
    ],
)
def test_bad_ladders_are_refused(spec, said):
    with pytest.raises(SpecError, match=said):
        parse(spec)


@pytest.mark.parametrize(
    "spec, said",
    [
        ("ladder((sum(), powersgd(rank=1)))", r"keep no state, powersgd\(.*\) does"),
        ("ladder((sum(), gather(qsgd(levels=1, bucket=4096))))", "omega must be below 1"),
    ],
)
def test_rungs_that_cannot_share_a_memory_are_refused_when_bound(spec, said):
    with pytest.raises(SpecError, match=said):
        parse(spec).bind(MODEL, Loopback.world(1)[0])


def test_auto_takes_codecs_and_selectors_for_rungs():
    made = parse("auto((sum(), cast('fp16'), topk(0.01)))")
    rungs = made.routes[0].reducer.rungs
    assert [repr(rung) for rung in rungs] == [
        "sum()",
        "gather(cast(dtype='fp16'))",
        "gather(sparse(topk(density=0.01), indices=golomb()))",
    ]
    assert parse(repr(made)) == made


times = st.floats(0.0, 10.0, allow_nan=False)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 4), times)
def test_the_plan_is_within_the_slack_of_the_best_of_all_plans(data, rungs, buckets, rest_s):
    rows = tuple(tuple(data.draw(times) for _ in range(buckets)) for _ in range(rungs))
    ready = tuple(sorted(data.draw(times) for _ in range(buckets)))
    table = Timetable(rows, ready, rest_s)
    steps = {plan: table.step_s(plan) for plan in itertools.product(range(rungs), repeat=buckets)}
    best = min(steps.values())
    chosen = table.least(0.05)
    assert steps[table.fastest] == best
    assert steps[chosen] <= 1.05 * best * (1 + 1e-12)
    for bucket, rung in enumerate(chosen):  # no bucket could stand lower by itself
        for lower in range(rung):
            assert steps[(*chosen[:bucket], lower, *chosen[bucket + 1 :])] > 1.05 * best * (1 - 1e-12)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(2, 4), st.integers(1, 4), times)
def test_a_plan_knows_what_an_exchange_takes_from_backward(data, rungs, buckets, rest_s):
    rows = tuple(tuple(data.draw(times) for _ in range(buckets)) for _ in range(rungs))
    ready = tuple(sorted(data.draw(times) for _ in range(buckets)))
    drag = tuple(data.draw(times) for _ in range(rungs))
    table, ideal = Timetable(rows, ready, rest_s, drag), Timetable(rows, ready, rest_s)
    alone = [(rung,) * buckets for rung in range(rungs)]
    for rung, plan in enumerate(alone):  # on one rung, all of its drag, where anything was exchanged
        expected = drag[rung] if sum(rows[rung]) else 0.0
        assert table.step_s(plan) == pytest.approx(ideal.step_s(plan) + expected)
    chosen = table.step_s(table.least(0.05))
    assert chosen <= 1.05 * min(map(table.step_s, alone)) * (1 + 1e-12)


@pytest.mark.parametrize("spec", ["auto()", "two_level(sum(), ladder(), local=2)"])
def test_what_a_link_decides_is_not_rehearsed(spec):
    with pytest.raises(SpecError, match="decides on the link itself"):
        next(rehearse([lift(spec)], MODEL))
