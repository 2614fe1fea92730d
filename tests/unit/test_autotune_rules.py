"""What autotune refuses."""

from __future__ import annotations

import pytest
import torch

from laconic.comm.loopback import Loopback
from laconic.core.errors import SpecError, StateError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.exchange.method import lift
from laconic.plan.rehearsal import rehearse
from laconic.reducers.autotune import CANDIDATES, CHOSEN, Autotune

MODEL = Layout.of([("a", (100, 100)), ("b", (100,))])


def test_a_state_of_more_candidates_is_refused():
    bound = Autotune((CANDIDATES[0],)).bind(MODEL, Loopback.world(1)[0])
    state = bound.state_dict() | {CHOSEN: torch.tensor(3)}
    with pytest.raises(StateError, match=r"has candidate 3, here they are 0\.\.0"):
        bound.load_state_dict(state)


@pytest.mark.parametrize(
    "spec, said",
    [
        ("autotune((sum(dtype='fp16'),))", r"the first is sum\(\), got"),
        ("autotune(())", r"the first is sum\(\)"),
        ("autotune((sum(), topk(0.1)))", "a candidate must be a reducer"),
        ("autotune((sum(), scatter_reduce(minmax(), pattern='ring')))", "can be no candidate, as each hop"),
        ("autotune(gain=1)", "gain must be a number in"),
        (
            "autotune(lossiest=sum(dtype='bf16'))",
            r"lossiest is one of the candidates .* got sum\(dtype='bf16'",
        ),
        ("auto(pinned=topk(density=0.5))", "pinned is one of the candidates"),
        ("autotune(every=0)", "every must be a whole number"),
        ("auto((sum(), dgc()))", r"a candidate is a reducer, codec or selector, got the method dgc\(\)"),
        ("auto('sum()')", "are a list of reducers, codecs or selectors, got 'sum"),
    ],
)
def test_bad_candidates_are_refused(spec, said):
    with pytest.raises(SpecError, match=said):
        parse(spec)


@pytest.mark.parametrize(
    "spec, said",
    [
        ("autotune((sum(), powersgd(rank=1)))", r"keep no state, powersgd\(.*\) does"),
        ("autotune((sum(), gather(qsgd(levels=1, block=4096))))", "omega must be below 1"),
    ],
)
def test_candidates_that_cannot_share_a_memory_are_refused_when_bound(spec, said):
    with pytest.raises(SpecError, match=said):
        parse(spec).bind(MODEL, Loopback.world(1)[0])


def test_auto_takes_codecs_and_selectors_for_candidates():
    made = parse("auto((sum(), cast('fp16'), topk(0.01)))")
    candidates = made.routes[0].reducer.candidates
    assert [repr(candidate) for candidate in candidates] == [
        "sum()",
        "gather(cast(dtype='fp16'))",
        "gather(sparse(topk(density=0.01), indices=golomb()))",
    ]
    assert parse(repr(made)) == made


@pytest.mark.parametrize("spec", ["auto()", "two_level(sum(), autotune(), ranks_per_node=2)"])
def test_what_a_link_decides_is_not_rehearsed(spec):
    with pytest.raises(SpecError, match="adapts to the link"):
        next(rehearse([lift(spec)], MODEL))


def test_by_default_it_stops_at_four_bits() -> None:
    usable = lift("auto()").routes[0].reducer.usable
    assert usable == CANDIDATES[:4] and repr(usable[-1]) == "scatter_reduce(minmax(block=128))"
    assert lift("auto(lossiest=sampled_topk(density=0.001))").routes[0].reducer.usable == CANDIDATES
    given = "auto((sum(), gather(sparse(topk(density=0.1)))))"
    assert len(lift(given).routes[0].reducer.usable) == 2
