"""Mixing weights: no mass is lost, and the known answers of exponential graphs."""

from __future__ import annotations

from math import log2

import pytest
import torch
from torch import Tensor

import laconic
from laconic.core.errors import SpecError
from laconic.strategies.gossip import mixing
from laconic.strategies.gossip.mixing import Mixing, matrix, metropolis, uniform
from laconic.strategies.gossip.mixing.averaging import averaging
from laconic.strategies.gossip.topologies import Topology

from .test_topologies import SPECS, every_topology, sized

ROUNDING = 1e-15  # of a product of few matrices whose entries are powers of 1/2, or of 1/3


def product(text: str, size: int, steps: int, weights: Mixing = uniform) -> Tensor:
    """What `steps` steps of gossip make of the unit vectors."""
    found = torch.eye(size, dtype=torch.float64)
    for step in range(steps):
        found = matrix(weights, laconic.parse(text), size, step) @ found
    return found


def deviation(text: str, size: int, steps: int) -> float:
    return float((product(text, size, steps) - 1 / size).abs().max())


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
def test_one_peer_averages_exactly_in_log2_steps(size: int) -> None:
    steps = round(log2(size))
    assert deviation("exponential()", size, steps) == 0.0
    assert deviation("exponential()", size, steps - 1) > 0.01
    assert averaging(laconic.parse("exponential()"), size) == (steps, 0.0)


def test_two_peers_average_nine_ranks_in_two_steps() -> None:
    assert deviation("exponential(peers=2)", 9, 2) <= ROUNDING
    assert averaging(laconic.parse("exponential(peers=2)"), 9).exact == 2


def test_other_sizes_average_nearly() -> None:
    assert deviation("exponential()", 6, 3) == pytest.approx(1 / 12, abs=ROUNDING)
    assert deviation("exponential()", 12, 4) == pytest.approx(1 / 24, abs=ROUNDING)


def test_directed_exponential_deviations_of_a_period() -> None:
    found = [deviation("directed_exponential()", 8, steps) for steps in range(1, 7)]
    assert found == [0.375, 0.375, 0.125, 0.125, 0, 0]


def few(topology: Topology, size: int) -> range:
    """The steps of a period, or 20 of one that never repeats."""
    return topology.span(size)[: topology.period(size) or 20]


def columns_and_rows(mixed: Tensor) -> tuple[bool, bool]:
    """Which sums are 1, by `check_column_stochastic` and `check_row_stochastic`."""
    held = []
    for check in (mixing.check_column_stochastic, mixing.check_row_stochastic):
        try:
            check(mixed)
            held.append(True)
        except SpecError:
            held.append(False)
    return held[0], held[1]


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


@pytest.mark.parametrize("text", [text for text in SPECS if laconic.parse(text).symmetric])
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


@pytest.mark.parametrize("text", [text for text in SPECS if not laconic.parse(text).symmetric])
def test_metropolis_wants_edges_both_ways(text: str) -> None:
    with pytest.raises(SpecError, match=r"go both ways at every step, but those of .* do not; use ring\(\)"):
        metropolis(laconic.parse(text), 0, 3, 0)


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


def test_sums_that_are_not_one_are_refused() -> None:
    mixed = torch.tensor([[0.5, 0.5], [0.5, 0.25]], dtype=torch.float64)
    with pytest.raises(SpecError, match=r"what rank 1 keeps and sends must sum to 1, got 0\.75; divide"):
        mixing.check_column_stochastic(mixed)
    with pytest.raises(SpecError, match=r"what rank 1 keeps and gets must sum to 1, got 0\.75; divide"):
        mixing.check_row_stochastic(mixed)
    with pytest.raises(SpecError, match=r"weights must be 0 or more, got -0\.5 from rank 1 to rank 0"):
        mixing.check_row_stochastic(torch.tensor([[1.5, -0.5], [0.0, 1.0]], dtype=torch.float64))
