"""scatter_reduce(feedback='both'): what any rounding loses comes back; saved, moved, and put back."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from tests.laws.worlds import MODEL, cut, everywhere, exchange_on, gradient, one_step
from tests.unit.memory_world import STEPS, held, lost, reloaded, resumed, states, through_a_void_step
from tests.unit.shared import for_each, refuses
from torch import Tensor

from laconic.comm.loopback import Loopback
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.exchange.method import lift
from laconic.exchange.state import resize

BOTH = "scatter_reduce(minmax(bits=2, block=16), feedback='both')"
DRAWN = "scatter_reduce(minmax(rounding='stochastic', block=8), feedback='both')"
TREE = "scatter_reduce(minmax(bits=2, block=16), pattern='tree', feedback='both')"
RING = "scatter_reduce(minmax(bits=2, block=16), pattern='ring', feedback='both')"
FEW = "scatter_reduce(sparse(topk(density=0.1)), pattern='tree', feedback='both')"
CODED = "scatter_reduce(sparse(topk(density=0.1), indices=golomb()), pattern='ring', feedback='both')"
SPECS = (BOTH, TREE, RING, FEW, CODED)


def error_of_the_average(spec: str, steps: int, size: int = 4) -> float:
    """|average of T means - true mean| / |true mean|, for gradients that stay as they are."""

    def play(comm) -> Tensor:  # type: ignore[no-untyped-def]
        exchange, total = exchange_on(comm, spec), torch.zeros(MODEL.numel, dtype=torch.float64)
        for _ in range(steps):
            total += one_step(exchange, gradient(comm.rank, 0), [MODEL])[0].double()
        return total / steps

    true = sum(gradient(rank, 0).double() for rank in range(size)) / size
    return float((everywhere(size, play)[0] - true).norm() / true.norm())


@for_each("spec", [*SPECS, DRAWN])
def test_the_error_of_the_average_falls_as_one_over_t(spec: str) -> None:
    """16 times the steps, at least 8 times less error: a bounded residual is all that is missing."""
    few, many = (error_of_the_average(spec, steps) for steps in (5, 80))
    assert many < few / 8


def test_on_the_way_up_alone_the_error_stays() -> None:
    """Why `feedback='both'` is there, and what the docs of `cgx` advise at 2 bits."""
    up = "error_fed(scatter_reduce(minmax(bits=2, block=16)))"
    few, many = (error_of_the_average(up, steps) for steps in (10, 160))
    assert many > few / 2
    assert error_of_the_average(BOTH, 160) < many / 8


@for_each("size, spec", [(1, BOTH), (2, TREE), (5, RING), (5, FEW), (2, CODED), (5, BOTH)])
def test_nothing_is_lost(size: int, spec: str) -> None:
    """All gradients = N * (all means + what is kept of them) + what the ranks hold. To float32, 6 steps."""
    cuts = [cut(MODEL, 1, 2, 1) if t < 2 else cut(MODEL, 2, 1, 1) for t in range(STEPS)]
    missing, kept = lost(spec, size, "once/mean", cuts)
    assert missing <= 1e-5 and kept.any()


@for_each("when, spec", [(0, BOTH), (1, RING), (3, FEW), (3, BOTH)])
def test_a_void_step_leaves_the_residual_of_the_mean_as_it_was(when: int, spec: str) -> None:
    assert any(through_a_void_step(spec, "once/mean", when)) == (when > 0)


@for_each("spec", [BOTH, RING, FEW])
def test_a_void_step_leaves_what_the_step_before_it_left(spec: str) -> None:
    """Nobody asks for the state between the two, which would settle it."""

    def play(comm: Loopback, steps: int) -> Tensor:
        exchange = exchange_on(comm, spec)
        for t in range(steps):
            flat = gradient(comm.rank, t)
            flat[0] = math.inf if t == 2 else flat[0]
            assert one_step(exchange, flat, [MODEL])[1] == (t != 2)
        return held(exchange.state_dict(), "once/mean")

    before, after = (everywhere(3, partial(play, steps=steps)) for steps in (2, 3))
    assert any(kept.any() for kept in before)
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@for_each("spec", SPECS)
def test_a_resumed_run_ends_with_the_same_bits(spec: str) -> None:
    """Though hops keep losses N-fold, for an N that is no power of two."""
    assert resumed(spec) == [[True] * 3] * 3


@pytest.mark.nightly
@for_each("spec", [BOTH, RING, FEW])
def test_among_64_a_rank_sends_at_most_twice_what_it_sends_among_4(spec: str) -> None:
    """As messages, without headers, 2 (N - 1) / N of them; a gather would send 21 times as much."""
    layout = Layout.of([("w", (256, 512))])

    def play(comm):  # type: ignore[no-untyped-def]
        exchange = exchange_on(comm, spec, layout=layout)
        one_step(exchange, torch.randn(layout.numel), [layout])
        sent = exchange.comm.snapshot()
        assert sent.payload_sent <= lift(spec).routes[0].reducer.nbytes(layout)
        return sent.bare_sent

    few, many = (max(everywhere(size, play)) for size in (4, 64))
    assert many <= 1.6 * few
    assert many < 4 * layout.numel / 2  # and far less than dense


@for_each("old, new, spec", [(4, 2, BOTH), (2, 3, TREE), (4, 2, CODED), (2, 3, BOTH)])
def test_another_number_of_ranks_keeps_what_was_held(old: int, new: int, spec: str) -> None:
    """Each element by the rank that adds it up now. Of what the ranks hold of their own, the mean."""
    before = states(old, spec)
    after = [state for state, _ in reloaded(resize(before, new), spec)]
    kept, own = (
        [[held(s["tensors"], k) for s in of] for of in (before, after)] for k in ("once/mean", "residual")
    )
    assert sum(kept[0]).any() and torch.equal(sum(kept[0]), sum(kept[1]))
    torch.testing.assert_close(sum(own[1]) / new, sum(own[0]) / old, rtol=1e-6, atol=1e-6)


def test_a_wrong_argument_is_refused() -> None:
    for arguments, says in (
        ("minmax(bits=2, block=16), feedback='down'", "feedback must be 'up' or 'both', got 'down'"),
        ("sparse(topk(density=0.1)), feedback='both'", "take server"),
        ("sparse(topk(density=0.1)), pattern='ring'", "pattern='tree' with feedback='both'"),
        ("sparse(threshold(0.1)), pattern='ring', feedback='both'", "sparse one with a density"),
        ("qsgd(coding='rice'), pattern='ring', feedback='both'", "sparse one with a density"),
    ):
        refuses(SpecError, says, parse, f"scatter_reduce({arguments})")
    wide = "scatter_reduce(minmax(bits=2), feedback='both')"  # at 2 bits and blocks of 512, omega is 28
    refuses(SpecError, "omega must be below 1", everywhere, 1, lambda comm: exchange_on(comm, wide))
