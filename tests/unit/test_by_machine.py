"""Machines of several ranks that follow a strategy between them."""

from __future__ import annotations

import pytest
import torch
from tests.unit.gossip_world import N, bound, gradient
from tests.unit.shared import for_each

from laconic.comm.loopback import Loopback
from laconic.core.errors import SpecError
from laconic.core.spec import parse


def played(spec, size, ranks_a_machine, steps=6, spoiled=None):
    """Each rank's parameters after every step; a machine of one takes the mean gradient of its `ranks`."""

    def play(comm):
        at_work, _, aside = bound(spec, comm)
        model = at_work.replica.parameters["x"]
        optimizer = torch.optim.SGD([model], lr=0.1, momentum=0.9)
        at_work.adopt_(torch.zeros(N))
        seen = []
        for step in range(steps):
            ranks = range(comm.rank * ranks_a_machine, (comm.rank + 1) * ranks_a_machine)
            model.grad = sum(gradient(rank, step) for rank in ranks) / ranks_a_machine
            if (comm.rank, step) == spoiled:
                model.grad[0] = torch.inf
            at_work.step(optimizer.step)
            seen.append(at_work.replica.flat.clone())
        at_work.drain(aside)
        seen.append(at_work.consensus(aside))
        at_work.close()
        return torch.stack(seen)

    return Loopback.run(size, play)


@for_each("inner", ["sgp()", "osgp(staleness=2)", "local_sgd(every=3)", "choco()"])
def test_two_ranks_of_a_machine_are_one_with_their_mean_gradient(inner):
    """Tolerance: the mean of two is summed in another order."""
    pairs = played(f"by_machine({inner}, ranks_per_node=2)", 4, 1)
    single = played(inner, 2, 2)
    for rank in range(4):
        torch.testing.assert_close(pairs[rank], single[rank // 2], rtol=1e-5, atol=1e-6)
    assert torch.equal(pairs[0], pairs[1])
    assert torch.equal(pairs[2], pairs[3])


def test_a_gradient_that_is_not_finite_stops_its_machine_for_a_step():
    seen = played("by_machine(local_sgd(every=100), ranks_per_node=2)", 4, 1, spoiled=(1, 3))
    assert all(bool(each.isfinite().all()) for each in seen)
    assert torch.equal(seen[0][3], seen[0][2])
    assert not torch.equal(seen[2][3], seen[2][2])


@for_each("inner", ["sgp()", "osgp()", "diloco(every=2)"])
def test_the_optimiser_of_a_machine_is_on_all_its_ranks(inner):
    """So the rank that follows a lost first rank goes on with its state, bit for bit."""

    def play(comm):
        at_work, _, _ = bound(f"by_machine({inner}, ranks_per_node=2)", comm)
        model = at_work.replica.parameters["x"]
        optimizer = torch.optim.Adam([model], lr=0.1)
        for step in range(5):
            model.grad = gradient(comm.rank, step)
            if (comm.rank, step) == (1, 3):
                model.grad[0] = torch.inf
            at_work.step(optimizer.step)
        at_work.close()
        return optimizer.state_dict()["state"]

    states = Loopback.run(4, play)
    assert [float(state[0]["step"]) for state in states] == [4, 4, 5, 5]
    for first, second in (states[:2], states[2:]):
        assert all(torch.equal(first[0][key], second[0][key]) for key in first[0])


def test_only_first_ranks_talk_between_machines():
    def play(comm):
        at_work, take, _ = bound("by_machine(sgp(), ranks_per_node=2)", comm)
        take(0)
        return at_work.comm.snapshot().parts

    parts = Loopback.run(4, play)
    assert [("gossip", "exchange") in part for part in parts] == [True, False, True, False]
    assert parts[0]["gossip", "exchange"].payload_sent == 4 * N


@for_each(
    "spec, size, words",
    [
        ("by_machine(sgp(), ranks_per_node=3)", 4, "does not divide"),
        ("by_machine(sgp(), ranks_per_node=4)", 4, "the number of ranks"),
        ("by_machine(topk(density=0.1))", 4, "must be a strategy"),
        ("by_machine(by_machine(sgp()))", 4, "cannot contain by_machine"),
    ],
)
def test_what_cannot_be_is_refused(spec, size, words):
    with pytest.raises(SpecError, match=words):
        parse(spec).check(size, torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))


def test_a_gradient_that_one_rank_of_a_machine_has_reaches_the_others():
    """A layer that only some inputs use: as in DistributedDataParallel, a rank without counts as 0."""

    def play(comm):
        at_work, _, aside = bound("by_machine(local_sgd(every=1), ranks_per_node=2)", comm)
        model = at_work.replica.parameters["x"]
        optimizer = torch.optim.SGD([model], lr=0.1)
        at_work.adopt_(torch.zeros(N))
        model.grad = torch.ones(N) if comm.rank == 1 else None
        at_work.step(optimizer.step)
        at_work.drain(aside)
        at_work.close()
        return at_work.replica.flat.clone()

    for flat in Loopback.run(2, play):
        assert torch.allclose(flat, torch.full((N,), -0.05))
