"""What servers hold: it is put back, saved, and moved when the number of ranks changes."""

from __future__ import annotations

import math

import pytest
import torch
from tests.laws.worlds import MODEL, cut, everywhere, exchange_on, gradient, one_step

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
STEPS = 6


def held(state, kind):
    """The memory of one kind on one rank, flat in the model's order."""
    flat = torch.zeros(MODEL.numel, dtype=torch.float64)
    for key, value in state.items():
        if f"/{kind}/" in key:
            at = MODEL[key.split("/")[-1]].offset
            flat[at : at + value.numel()] += value.flatten()
    return flat


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_nothing_is_lost(spec, size):
    """All gradients = N * (all means + what the servers hold) + what the ranks hold. To float32, 6 steps."""

    def play(comm):
        exchange = exchange_on(comm, spec)
        means = [one_step(exchange, gradient(comm.rank, t), [MODEL])[0] for t in range(STEPS)]
        return means, exchange.state_dict()

    results = everywhere(size, play)
    given = sum(gradient(r, t).double() for r in range(size) for t in range(STEPS))
    applied = size * sum(mean.double() for mean in results[0][0])
    ranks = sum(held(state, "residual") for _, state in results)
    servers = size * sum(held(state, "once/server") for _, state in results)
    assert (given - applied - ranks - servers).abs().max() <= 1e-5 * given.abs().max()
    if size > 1:  # alone, a server gets bfloat16 and answers in bfloat16
        assert parse(spec).down.needs_feedback == bool(servers.any())


@pytest.mark.parametrize("when", [0, 1, 3])
def test_a_void_step_leaves_every_memory_as_if_nothing_had_been_sent(when):
    """Inf on rank 1 in the last bucket, when two have been served. Also while buckets are regrouped."""
    inf_at = MODEL["a.weight"].offset + 77

    def play(comm):
        exchange, before = exchange_on(comm, STC), {}
        for t in range(5):
            flat = gradient(comm.rank, t)
            if t == when:
                before = {key: value for key, value in exchange.state_dict().items() if "server" in key}
                flat[inf_at] = math.inf if comm.rank == 1 else flat[inf_at]
            _, valid = one_step(exchange, flat, cut(MODEL, 1, 2, 1) if t < 1 else cut(MODEL, 2, 1, 1))
            assert valid == (t != when)
            if t == when:
                after = exchange.state_dict()
                assert all(torch.equal(value, after[key]) for key, value in before.items())
        return sum(1 for value in before.values() if value.any())

    served = everywhere(3, play)
    assert sum(served) == (3 if when else 0), "each matrix is held once"


@pytest.mark.parametrize("spec", SPECS)
def test_a_resumed_run_ends_with_the_same_bits(spec):
    def play(comm):
        unbroken, before = exchange_on(comm, spec), exchange_on(comm, spec)
        expected = [one_step(unbroken, gradient(comm.rank, t), [MODEL])[0] for t in range(STEPS)]
        for t in range(3):
            one_step(before, gradient(comm.rank, t), cut(MODEL, 2, 2))
        after = exchange_on(comm, spec)
        after.load_state_dict(before.state_dict(), step=3)
        got = [one_step(after, gradient(comm.rank, t), cut(MODEL, 1, 3))[0] for t in range(3, STEPS)]
        return [torch.equal(a, b) for a, b in zip(expected[3:], got, strict=True)]

    assert everywhere(3, play) == [[True] * 3] * 3


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
