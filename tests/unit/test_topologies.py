"""Topologies: ranks agree on who sends to whom, news reaches all, and what cannot gossip is refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

import laconic
from laconic.core import spec
from laconic.core.errors import SpecError
from laconic.exchange.method import lift
from laconic.strategies.gossip.topologies import ENDLESS, Peers, Topology

SIZES = range(2, 18)
SPECS = [
    text
    for name, home in sorted(spec.modules().items())
    if home.startswith("laconic.strategies.gossip.topologies.")
    for text in (spec.find(name).examples or (f"{name}()",))  # type: ignore[attr-defined]
]
CHAIN = "graph(edges=((0, 1), (1, 2), (2, 3)))"


def fitting(text: str) -> list[int]:
    """Sizes that pass `check`."""
    topology, sizes = laconic.parse(text), []
    for size in SIZES:
        try:
            topology.check(size)
        except SpecError:
            continue
        sizes.append(size)
    return sizes


def sized(text: str) -> Iterator[tuple[Topology, int]]:
    """A topology with every size that it is made for."""
    return ((laconic.parse(text), size) for size in fitting(text))


every_topology = pytest.mark.parametrize("text", SPECS)


def steps(topology: Topology, size: int) -> range:
    return range(2 * (topology.period(size) or 20) + 1)


def test_there_is_something_to_test() -> None:
    assert len({text.partition("(")[0] for text in SPECS}) == 10
    assert {text: fitting(text) for text in ("ring()", "bipartite_exponential()", "torus(rows=2)")} == {
        "ring()": list(SIZES),
        "bipartite_exponential()": list(SIZES[::2]),
        "torus(rows=2)": list(SIZES[::2]),
    }
    assert all(len(fitting(text)) > 7 for text in SPECS if not text.startswith("graph"))
    assert all(fitting(text) for text in SPECS)


@every_topology
def test_out_and_in_agree_between_ranks(text: str) -> None:
    for topology, size in sized(text):
        for step in steps(topology, size):
            peers = [topology.peers(rank, size, step) for rank in range(size)]
            for rank, (out, into) in enumerate(peers):
                assert out == tuple(sorted(set(out) - {rank})) and into == tuple(sorted(set(into) - {rank}))
                assert set(out) == {other for other in range(size) if rank in peers[other].into}
                assert set(into) == {other for other in range(size) if rank in peers[other].out}


@every_topology
def test_it_repeats_after_its_period_and_not_before(text: str) -> None:
    for topology, size in sized(text):
        period = topology.period(size)
        count = 2 * (period or 20)
        graphs = [[topology.peers(rank, size, step) for rank in range(size)] for step in range(count)]
        if period:
            assert graphs[:period] == graphs[period:] and len(topology.span(size)) == period
            assert period == 1 or size < 4 or any(graphs[0] != later for later in graphs[1:period])
        elif size > 5:
            assert all(graphs[:shift] != graphs[shift : 2 * shift] for shift in range(2, 21))


@every_topology
def test_what_one_rank_knows_reaches_all(text: str) -> None:
    """By brute force: flooding along the messages of successive steps, from any rank and two first steps."""
    for topology, size in sized(text):
        length = len(topology.span(size))
        for first in (0, length // 2):
            for origin in range(size):
                known = {origin}
                for step in range(first, first + size * length):
                    known |= set(chain.from_iterable(topology.peers(rank, size, step).out for rank in known))
                    if len(known) == size:
                        break
                assert len(known) == size


@every_topology
def test_symmetric_is_what_it_says(text: str) -> None:
    """At every step of every size, or it does not say so."""
    both_ways = [
        topology.peers(rank, size, step).out == topology.peers(rank, size, step).into
        for topology, size in sized(text)
        for step in topology.span(size)
        for rank in range(size)
    ]
    assert laconic.parse(text).symmetric == all(both_ways)


@every_topology
def test_a_spec_prints_as_the_call_that_makes_it(text: str) -> None:
    made = laconic.parse(text)
    assert isinstance(made, Topology) and repr(made) == text
    assert laconic.parse(repr(made)) == made and hash(laconic.parse(repr(made))) == hash(made)
    with pytest.raises(SpecError, match="compress takes a method, codec, selector or reducer"):
        lift(text)


def out_of(text: str, size: int, count: int, rank: int = 0) -> list[tuple[int, ...]]:
    return [laconic.parse(text).peers(rank, size, step).out for step in range(count)]


def test_phone_books_of_the_papers() -> None:
    assert out_of("exponential()", 12, 5) == [(1,), (2,), (4,), (8,), (1,)]
    assert out_of("exponential(peers=2)", 9, 3) == [(1, 2), (3, 6), (1, 2)]
    assert out_of("exponential(peers=2)", 6, 2) == [(1, 2), (3,)]  # 2 * 3 is oneself
    assert out_of("exponential(peers=3)", 4, 1) == [(1, 2, 3)]
    assert laconic.parse("exponential(peers=2)").period(243) == 5
    assert laconic.parse("exponential(peers=2)").period(244) == 6
    assert out_of("static_exponential()", 12, 2, rank=10) == [(0, 2, 6, 11)] * 2
    assert out_of("directed_exponential()", 8, 6, rank=3) == [(4,), (2,), (5,), (1,), (7,), (7,)]
    assert out_of("bipartite_exponential()", 12, 8, rank=1) == [(x,) for x in (2, 0, 4, 10, 6, 8, 10, 4)]
    assert out_of("bipartite_exponential()", 12, 2, rank=2) == [(1,), (3,)]
    assert out_of("ring()", 2, 1) == [(1,)] and out_of("ring()", 5, 1, rank=4) == [(0, 3)]
    assert out_of("linear()", 5, 1, rank=4) == [(3,)] and out_of("linear()", 5, 1, rank=2) == [(1, 3)]
    assert out_of("torus()", 16, 1, rank=5) == [(1, 4, 6, 9)]
    assert out_of("torus()", 6, 1) == [(1, 2, 3)]  # 2 rows of 3: above is below
    assert out_of("torus(rows=3)", 6, 1, rank=3) == [(1, 2, 5)]
    assert out_of("torus()", 7, 1) == out_of("ring()", 7, 1)
    assert out_of("complete()", 4, 1, rank=2) == [(0, 1, 3)]
    assert laconic.parse("graph([[0, 1], [1, 2]])").peers(1, 3, 9) == Peers((0, 2), (0, 2))


@given(st.integers(0, 2**63 - 1), st.integers(2, 60), st.integers(0, 2**40))
def test_a_random_matching_pairs_all_but_one_of_an_odd_number(seed: int, size: int, step: int) -> None:
    topology = laconic.parse(f"random_matching(seed={seed})")
    met = [topology.peers(rank, size, step).out for rank in range(size)]
    assert sum(len(out) for out in met) == size - size % 2
    assert all(met[out[0]] == (rank,) for rank, out in enumerate(met) if out)


def test_random_matchings_are_all_equally_likely() -> None:
    """4 ranks have 3 matchings. 3,000 steps: each 1,000 times, and 5 standard deviations are 129."""
    seen: dict[tuple[int, ...], int] = {}
    for step in range(3000):
        met = laconic.parse("random_matching()").peers(0, 4, step).out
        seen[met] = seen.get(met, 0) + 1
    assert sorted(seen) == [(1,), (2,), (3,)] and all(abs(count - 1000) < 129 for count in seen.values())
    assert out_of("random_matching()", 16, 20) != out_of("random_matching(seed=1)", 16, 20)


@pytest.mark.parametrize(
    ("text", "size", "words"),
    [
        *(
            (text, 1, r"the number of ranks must be a whole number of 2 or more.*got 1; .*start more")
            for text in SPECS
        ),
        ("ring()", 0, "got 0"),
        ("ring()", 4.0, "got 4.0"),
        ("bipartite_exponential()", 7, r"needs an even number of ranks, got 7; use 6 or 8"),
        ("torus(rows=3)", 16, r"rows must divide the number of ranks, got rows=3 for 16 ranks; use rows=4"),
        ("exponential(peers=4)", 4, r"peers must be in 1\.\.3 among 4 ranks, got 4; complete\(\)"),
        (CHAIN, 3, r"must name ranks in 0\.\.2 among 3 ranks, got \(2, 3\);.* start 4 workers"),
        (CHAIN, 5, r"graph\(.*\) does not connect 5 ranks: no path leads from rank 0 to rank 4; add edges"),
        (
            "graph(((0, 1), (1, 2), (2, 1)), directed=True)",
            3,
            r"does not connect 3 ranks: no path leads from rank 1 to rank 0",
        ),
        ("graph(((1, 0), (1, 2), (2, 1)), directed=True)", 3, "no path leads from rank 0 to rank 1"),
    ],
)
def test_what_cannot_gossip_is_refused(text: str, size: int, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        laconic.parse(text).check(size)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("exponential(peers=0)", r"exponential: peers must be a whole number of 1 or more.*got 0"),
        ("exponential(2.0)", "got 2.0"),
        ("torus(rows=-1)", "torus: rows must be a whole number of 0 or more.*got -1; 0 makes"),
        ("random_matching(seed='x')", "seed must be a whole number"),
        ("graph()", "missing a required argument: 'edges'"),
        ("graph(())", r"pairs of two different ranks, such as \(\(0, 1\), \(1, 2\)\), got \(\)"),
        ("graph((0, 1))", r"pairs of two different ranks.*got \(0, 1\)"),
        ("graph(((0, 0),))", "two different ranks"),
        ("graph(((0, -1),))", "two different ranks"),
        ("graph(((0, 1, 2),))", "two different ranks"),
        ("graph(((0, True),))", "two different ranks"),
        ("graph(((0, 1), (1, 0)))", r"edges must be different, got \(1, 0\) again"),
        ("graph(((0, 1), (0, 1)), directed=True)", r"edges must be different, got \(0, 1\) again"),
        ("graph(((0, 1),), directed=1)", "directed must be True or False, got 1"),
        ("topology()", "unknown name 'topology'"),
        ("mixing()", "unknown name 'mixing'"),
    ],
)
def test_a_wrong_argument_is_refused(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        laconic.parse(text)


def test_one_that_never_repeats_connects_within_few_steps() -> None:
    topology = laconic.parse("random_matching(seed=3)")
    assert topology.period(64) is None and len(topology.span(64)) == ENDLESS
    topology.check(64)
