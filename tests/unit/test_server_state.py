"""What servers hold: it is put back, saved, and moved when the number of ranks changes."""

from __future__ import annotations

import pytest
import torch
from tests.laws.worlds import MODEL, everywhere, exchange_on, gradient, one_step
from tests.unit.memory_world import held, lost, resumed, through_a_void_step

import laconic
from laconic.core.errors import StateError
from laconic.core.spec import parse
from laconic.exchange.state import FORMAT, RankState, label, model_digest

STC = "server(sparse(topk(density=0.1)), sparse(topk(density=0.05)))"
SPECS = (
    STC,
    "server(cast('bf16'), cast('bf16'))",
    "server(sparse(topk(density=0.05), indices=golomb()), dense())",
    "server(sparse(randomk(density=0.1)), sparse(topk(density=0.05)))",
)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_nothing_is_lost(spec, size):
    """All gradients = N * (all means + what the servers hold) + what the ranks hold. To float32, 6 steps."""
    missing, kept = lost(spec, size, "once/server")
    assert missing <= 1e-5
    if size > 1:  # alone, a server gets bfloat16 and answers in bfloat16
        assert parse(spec).down.needs_feedback == bool(kept.any())


@pytest.mark.parametrize("when", [0, 1, 3])
def test_a_void_step_leaves_every_memory_as_if_nothing_had_been_sent(when):
    served = through_a_void_step(STC, "once/server", when)
    assert sum(served) == (3 if when else 0), "each matrix is held once"


@pytest.mark.parametrize("spec", SPECS)
def test_a_resumed_run_ends_with_the_same_bits(spec):
    assert resumed(spec) == [[True] * 3] * 3


def rank_state(comm, exchange):
    tensors = label(exchange.state_dict(), comm.rank)
    return RankState(
        format=FORMAT,
        spec=STC,
        model=model_digest(MODEL),
        rank=comm.rank,
        size=comm.size,
        seed=0,
        step=exchange.step,
        tensors=tensors,
    )


def reloaded(states, steps=0):
    """The states of these ranks, loaded, and after some steps with no gradient; and the means of those."""

    def play(comm):
        exchange, prefix = exchange_on(comm, STC), f"rank{comm.rank}/"
        state = states[comm.rank]["tensors"]
        exchange.load_state_dict({key.removeprefix(prefix): value for key, value in state.items()}, step=3)
        means = [one_step(exchange, torch.zeros(MODEL.numel), [MODEL])[0] for _ in range(steps)]
        return rank_state(comm, exchange), sum(means, torch.zeros(MODEL.numel))

    return everywhere(len(states), play)


def what_servers_hold(states):
    """Of all ranks, and how many ranks hold the first tensor."""
    each = [held(state["tensors"], "once/server") for state in states]
    return sum(each), sum(bool(flat[: MODEL["a.weight"].numel].any()) for flat in each)


def test_resizing_moves_what_the_servers_hold_to_their_new_homes():
    """4 ranks to 2 to 3; and 4 to 2 to 3 on disk alone, where each rank's file has all of it."""

    def train(comm):
        exchange = exchange_on(comm, STC)
        for t in range(3):
            one_step(exchange, gradient(comm.rank, t), [MODEL])
        return rank_state(comm, exchange)

    four = everywhere(4, train)
    mass, holders = what_servers_hold(four)
    assert mass.abs().sum() > 0 and holders == 1
    two = laconic.resize(four, 2)
    for on_the_way in (two, [state for state, _ in reloaded(two)]):
        three = laconic.resize(on_the_way, 3)
        now, holders = what_servers_hold([state for state, _ in reloaded(three)])
        assert torch.equal(now, mass) and holders == 1
    # Run on without gradients, two ranks apply all that four have held back.
    _, applied = reloaded(two, steps=60)[0]
    ranks = sum(held(state["tensors"], "residual") for state in four) / 4
    torch.testing.assert_close(applied.double(), ranks + mass, rtol=1e-4, atol=1e-4)


def test_a_state_of_another_model_is_refused():
    def play(comm):
        bound = parse(STC).bind(MODEL, comm)
        with pytest.raises(StateError, match=r"no once/server/a\.weight"):
            bound.load_state_dict({})
        with pytest.raises(StateError, match="keeps no state"):
            parse("server(dense(), dense())").bind(MODEL, comm).load_state_dict(bound.state_dict())
        return bound.state_dict().keys()

    assert everywhere(1, play) == [{f"once/server/{name}" for name in MODEL.names}]
