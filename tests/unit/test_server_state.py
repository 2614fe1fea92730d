"""What servers hold: it is put back, saved, and moved when the number of ranks changes."""

from __future__ import annotations

import pytest
import torch
from tests.laws.worlds import MODEL, everywhere
from tests.unit.memory_world import held, lost, reloaded, resumed, states, through_a_void_step
from tests.unit.shared import for_each, refuses
from tests.unit.test_server import SPECS, STC

import laconic
from laconic.core.errors import StateError
from laconic.core.spec import parse


@for_each("spec", SPECS)
@for_each("size", [1, 2, 5])
def test_nothing_is_lost(spec, size):
    """All gradients = N * (all means + what the servers hold) + what the ranks hold. To float32, 6 steps."""
    missing, kept = lost(spec, size, "once/server")
    assert missing <= 1e-5
    if size > 1:  # alone, a server gets bfloat16 and answers in bfloat16
        assert parse(spec).down.needs_feedback == bool(kept.any())


@for_each("when", [0, 1, 3])
def test_a_void_step_leaves_every_memory_as_if_nothing_had_been_sent(when):
    served = through_a_void_step(STC, "once/server", when)
    assert sum(served) == (3 if when else 0), "each matrix is held once"


@for_each("spec", SPECS)
def test_a_resumed_run_ends_with_the_same_bits(spec):
    assert resumed(spec) == [[True] * 3] * 3


def what_servers_hold(states):
    """Of all ranks, and how many ranks hold the first tensor."""
    parts = [held(state["tensors"], "once/server") for state in states]
    return sum(parts), sum(bool(flat[: MODEL["a.weight"].numel].any()) for flat in parts)


def test_resizing_moves_what_the_servers_hold_to_their_new_homes():
    """4 ranks to 2 to 3; and 4 to 2 to 3 on disk alone, where each rank's file has all of it."""
    four = states(4, STC)
    mass, holders = what_servers_hold(four)
    assert mass.abs().sum() > 0 and holders == 1
    two = laconic.resize(four, 2)
    for on_the_way in (two, [state for state, _ in reloaded(two, STC)]):
        three = laconic.resize(on_the_way, 3)
        now, holders = what_servers_hold([state for state, _ in reloaded(three, STC)])
        assert torch.equal(now, mass) and holders == 1
    # Run on without gradients, two ranks apply all that four have held back.
    _, applied = reloaded(two, STC, steps=60)[0]
    ranks = sum(held(state["tensors"], "residual") for state in four) / 4
    torch.testing.assert_close(applied.double(), ranks + mass, rtol=1e-4, atol=1e-4)


def test_a_state_of_another_model_is_refused():
    def play(comm):
        bound = parse(STC).bind(MODEL, comm)
        refuses(StateError, r"no once/server/a\.weight", bound.load_state_dict, {})
        with pytest.raises(StateError, match="is stateless"):
            parse("server(dense(), dense())").bind(MODEL, comm).load_state_dict(bound.state_dict())
        return bound.state_dict().keys()

    assert everywhere(1, play) == [{f"once/server/{name}" for name in MODEL.names}]
