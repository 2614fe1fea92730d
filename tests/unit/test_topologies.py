"""Topologies: ranks agree on who sends to whom, news reaches all, and what cannot gossip is refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import log2

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.shared import for_each, refuses
from torch import Tensor

import laconic
from laconic.core import spec
from laconic.core.errors import SpecError
from laconic.exchange.method import lift
from laconic.strategies.gossip import mixing
from laconic.strategies.gossip.mixing import Mixing, matrix, metropolis, uniform
from laconic.strategies.gossip.mixing.averaging import averaging
from laconic.strategies.gossip.topologies import ENDLESS, Peers, Topology

SIZES = range(2, 18)
SPECS = [
    text
    for name, home in sorted(spec.modules().items())
    if home.startswith("laconic.strategies.gossip.topologies.")
    for text in (spec.find(name).examples or (f"{name}()",))  # type: ignore[attr-defined]
]
CHAIN = "graph(edges=((0, 1), (1, 2), (2, 3)))"


def fits(topology: Topology, size: int) -> bool:
    try:
        topology.check(size)
    except SpecError:
        return False
    return True


def fitting(text: str) -> list[int]:
    """Sizes that pass `check`."""
    topology = laconic.parse(text)
    return [size for size in SIZES if fits(topology, size)]


def sized(text: str) -> Iterator[tuple[Topology, int]]:
    """A topology with every size that it is made for."""
    return ((laconic.parse(text), size) for size in fitting(text))


every_topology = for_each("text", SPECS)


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
    refuses(SpecError, "compress takes a method, codec, selector or reducer", lift, text)


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


def test_what_cannot_gossip_or_be_made_is_refused() -> None:
    one, unconnected = (
        r"the number of ranks must be a whole number of 2 or more.*got 1; .*start more",
        ("graph(((0, 1), (1, 2), (2, 1)), directed=True)"),
    )
    for text, size, words in (
        *((text, 1, one) for text in SPECS),
        ("ring()", 0, "got 0"),
        ("ring()", 4.0, "got 4.0"),
        ("bipartite_exponential()", 7, r"needs an even number of ranks, got 7; use 6 or 8"),
        ("torus(rows=3)", 16, r"rows must divide the number of ranks, got rows=3 for 16 ranks; use rows=4"),
        ("exponential(peers=4)", 4, r"peers must be in 1\.\.3 among 4 ranks, got 4; complete\(\)"),
        (CHAIN, 3, r"must name ranks in 0\.\.2 among 3 ranks, got \(2, 3\);.* start 4 workers"),
        (CHAIN, 5, r"graph\(.*\) does not connect 5 ranks: no path leads from rank 0 to rank 4; add edges"),
        (unconnected, 3, r"does not connect 3 ranks: no path leads from rank 1 to rank 0"),
        ("graph(((1, 0), (1, 2), (2, 1)), directed=True)", 3, "no path leads from rank 0 to rank 1"),
    ):
        refuses(SpecError, words, laconic.parse(text).check, size)
    for text, words in (
        ("exponential(peers=0)", r"exponential: peers must be a whole number of 1 or more.*got 0"),
        ("exponential(2.0)", "got 2.0"),
        ("torus(rows=-1)", "torus: rows must be a whole number of 0 or more.*got -1; 0 makes"),
        ("random_matching(seed='x')", "seed must be a whole number"),
        ("graph()", "missing a required argument: 'edges'"),
        ("graph(())", r"pairs of two different ranks, such as \(\(0, 1\), \(1, 2\)\), got \(\)"),
        ("graph((0, 1))", r"pairs of two different ranks.*got \(0, 1\)"),
        *(
            (f"graph(({edge},))", "two different ranks")
            for edge in ("(0, 0)", "(0, -1)", "(0, 1, 2)", "(0, True)")
        ),
        ("graph(((0, 1), (1, 0)))", r"edges must be different, got \(1, 0\) again"),
        ("graph(((0, 1), (0, 1)), directed=True)", r"edges must be different, got \(0, 1\) again"),
        ("graph(((0, 1),), directed=1)", "directed must be True or False, got 1"),
        ("topology()", "unknown name 'topology'"),
        ("mixing()", "unknown name 'mixing'"),
    ):
        refuses(SpecError, words, laconic.parse, text)


def test_one_that_never_repeats_connects_within_few_steps() -> None:
    topology = laconic.parse("random_matching(seed=3)")
    assert topology.period(64) is None and len(topology.span(64)) == ENDLESS
    topology.check(64)


ROUNDING = 1e-15  # of a product of few matrices whose entries are powers of 1/2, or of 1/3


def product(text: str, size: int, steps: int, weights: Mixing = uniform) -> Tensor:
    """What `steps` steps of gossip make of the unit vectors."""
    found = torch.eye(size, dtype=torch.float64)
    for step in range(steps):
        found = matrix(weights, laconic.parse(text), size, step) @ found
    return found


def deviation(text: str, size: int, steps: int) -> float:
    return float((product(text, size, steps) - 1 / size).abs().max())


def test_averages_of_exponential_graphs() -> None:
    for size in (2, 4, 8, 16, 32, 64):
        steps = round(log2(size))
        assert deviation("exponential()", size, steps) == 0.0
        assert deviation("exponential()", size, steps - 1) > 0.01
        assert averaging(laconic.parse("exponential()"), size) == (steps, 0.0)
    assert deviation("exponential(peers=2)", 9, 2) <= ROUNDING
    assert averaging(laconic.parse("exponential(peers=2)"), 9).exact == 2
    assert deviation("exponential()", 6, 3) == pytest.approx(1 / 12, abs=ROUNDING)
    assert deviation("exponential()", 12, 4) == pytest.approx(1 / 24, abs=ROUNDING)
    found = [deviation("directed_exponential()", 8, steps) for steps in range(1, 7)]
    assert found == [0.375, 0.375, 0.125, 0.125, 0, 0]


def few(topology: Topology, size: int) -> range:
    """The steps of a period, or 20 of one that never repeats."""
    return topology.span(size)[: topology.period(size) or 20]


def sums_to_one(check, mixed: Tensor) -> bool:  # type: ignore[no-untyped-def]
    try:
        check(mixed)
    except SpecError:
        return False
    return True


def columns_and_rows(mixed: Tensor) -> tuple[bool, bool]:
    """Which sums are 1, by `check_column_stochastic` and `check_row_stochastic`."""
    checks = mixing.check_column_stochastic, mixing.check_row_stochastic
    return sums_to_one(checks[0], mixed), sums_to_one(checks[1], mixed)


@every_topology
def test_uniform_shares_lose_no_mass_and_sender_and_receiver_agree(text: str) -> None:
    for topology, size in sized(text):
        doubly = True
        for step in few(topology, size):
            mixed = matrix(uniform, topology, size, step)
            columns, rows = columns_and_rows(mixed)
            assert columns and bool((mixed >= 0).all()) and mixed.dtype == torch.float64
            assert float((mixed.sum(0) - 1).abs().max()) < 1e-14
            doubly &= rows
            for rank in range(size):
                weights = uniform(topology, rank, size, step)
                assert {weights.own, *weights.out.values()} == {1 / (1 + len(weights.out))}
                assert all(share == mixed[rank, source] for source, share in weights.into.items())
                assert int((mixed[rank] > 0).sum()) == 1 + len(weights.into)
        assert mixing.is_regular(topology, size) == doubly


def test_which_graphs_are_regular() -> None:
    def regular(text: str, size: int) -> bool:
        return mixing.is_regular(laconic.parse(text), size)

    assert not regular("linear()", 3) and regular("linear()", 2)
    assert not regular("graph(((0, 1), (1, 2), (2, 3), (3, 0), (0, 2)))", 4)
    assert regular("graph(((0, 1), (1, 2), (2, 0)), directed=True)", 3)
    assert not regular("graph(((0, 1), (1, 2), (2, 0), (0, 2)), directed=True)", 3)
    assert all(regular(text, 12) for text in SPECS if not text.startswith(("graph", "linear")))


@for_each("text", [text for text in SPECS if laconic.parse(text).symmetric])
def test_metropolis_shares_are_doubly_stochastic_and_symmetric(text: str) -> None:
    for topology, size in sized(text):
        regular = mixing.is_regular(topology, size)
        for step in few(topology, size):
            mixed = matrix(metropolis, topology, size, step)
            assert columns_and_rows(mixed) == (True, True)
            assert torch.equal(mixed, mixed.T) and bool((mixed.diagonal() > 0).all())
            for rank in range(size):
                weights = metropolis(topology, rank, size, step)
                assert weights.into == weights.out
            if regular:
                assert float((mixed - matrix(uniform, topology, size, step)).abs().max()) < 1e-15


@every_topology
def test_push_sum_weights_lead_every_rank_to_the_mean(text: str) -> None:
    """x / w on every rank, whatever the graph: the sum is kept, and the error falls as `averaging` says."""
    for topology, size in sized(text):
        exact, kept = found = averaging(topology, size)
        mixed = [matrix(uniform, topology, size, step) for step in topology.span(size)]
        x = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
        both = torch.stack((x, torch.ones_like(x)), dim=1)
        for step in range(exact or found.steps_to(1e-5)):
            both = mixed[step % len(mixed)] @ both
        values, weights = both.unbind(1)
        assert float(values.sum()) == pytest.approx(float(x.sum()), abs=1e-12)
        assert float(weights.sum()) == pytest.approx(size, abs=1e-12)
        assert float((values / weights - x.mean()).abs().max()) < (1e-14 if exact else 2e-4)
        assert 0 <= kept < 1


def test_speed_of_averaging() -> None:
    """Second eigenvalues in closed form: ring (1 + 2 cos(2 pi / n)) / 3; half of the squared error kept."""
    angle = torch.tensor(2 * torch.pi / 16, dtype=torch.float64)
    assert averaging(laconic.parse("ring()"), 16).kept == pytest.approx(float(1 + 2 * angle.cos()) / 3)
    assert averaging(laconic.parse("complete()"), 7) == (1, 0.0)
    assert averaging(laconic.parse("random_matching()"), 32).kept == pytest.approx(0.5**0.5, abs=0.06)
    assert averaging(laconic.parse("linear()"), 3).kept == pytest.approx(0.5)


def test_what_does_not_mix_is_refused() -> None:
    mixed = torch.tensor([[0.5, 0.5], [0.5, 0.25]], dtype=torch.float64)
    negative = torch.tensor([[1.5, -0.5], [0.0, 1.0]], dtype=torch.float64)
    columns, rows = mixing.check_column_stochastic, mixing.check_row_stochastic
    refuses(
        SpecError, r"the shares that rank 1 keeps and sends must sum to 1, got 0\.75; divide", columns, mixed
    )
    refuses(
        SpecError, r"the shares that rank 1 keeps and receives must sum to 1, got 0\.75; divide", rows, mixed
    )
    refuses(SpecError, r"weights must be 0 or more, got -0\.5 from rank 1 to rank 0", rows, negative)
    words = r"go both ways at every step, but those of .* do not; use ring\(\)"
    for text in SPECS:
        if not laconic.parse(text).symmetric:
            refuses(SpecError, words, metropolis, laconic.parse(text), 0, 3, 0)
