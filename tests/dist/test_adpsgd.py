"""AD-PSGD in real processes: nobody waits for anybody, and nothing is lost."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.core.errors import SpecError
from laconic.core.spec import parse
from tests.dist.nets import agree, flat
from tests.dist.pool import on_ranks
from tests.dist.runs import trained


class Vector(nn.Module):
    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(5))


def pushed(rank, step):
    """A gradient that does not depend on the parameters."""
    return torch.randn(5, generator=torch.Generator().manual_seed(100 * step + rank))


def sum_is_kept(wire, steps, every=1):
    model = Vector()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = laconic.distribute(model, plain, f"adpsgd(wire='{wire}', every={every})")
    for step in range(steps):
        model.x.grad = pushed(dist.get_rank(), step)
        optimizer.step()
    optimizer.finish()
    found, met = flat(model), optimizer.notes()["rounds"]
    optimizer.remove()
    return found, met


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_whoever_meets_whom_the_sum_is_kept(pool, wire):
    """The average of the group is that of all updates, in float32, on any wire."""
    steps, size = 12, 4
    updates = sum(pushed(rank, step) for rank in range(size) for step in range(steps))
    results = pool.run(size, sum_is_kept, wire, steps)
    for found, _ in results:
        torch.testing.assert_close(found, -0.1 / size * updates, rtol=1e-4, atol=1e-5)
    met = [rounds for _, rounds in results]
    assert met[1] + met[3] == met[0] + met[2] > 0


def test_it_asks_no_more_often_than_it_is_told(pool):
    """Two odd ranks, at steps 0, 5 and 10 of theirs: six meetings at most, and the sum is kept."""
    steps, size, every = 12, 4, 5
    updates = sum(pushed(rank, step) for rank in range(size) for step in range(steps))
    results = pool.run(size, sum_is_kept, "fp32", steps, every)
    for found, _ in results:
        torch.testing.assert_close(found, -0.1 / size * updates, rtol=1e-4, atol=1e-5)
    met = [rounds for _, rounds in results]
    assert 0 < met[1] + met[3] == met[0] + met[2] <= 6


@on_ranks(4, [2, 3])
def test_a_rank_that_sleeps_holds_nobody_up(sleeper):
    """It would hang otherwise."""
    model = Vector()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = laconic.distribute(model, plain, "adpsgd()")
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    for step in range(10):
        if rank == sleeper and step == 1:
            store.wait([f"rank {other}" for other in range(dist.get_world_size()) if other != sleeper])
        model.x.grad = pushed(rank, step)
        optimizer.step()
    store.set(f"rank {rank}", "done")
    optimizer.finish()
    same = agree(model)
    optimizer.remove()
    assert same


@on_ranks(2, [("adpsgd(every=4)", (1, 4, 8)), ("slowmo(every=4, beta=0.0, base=adpsgd(every=4))", (1, 8))])
def test_nobody_asks_a_rank_that_has_yet_to_adopt_the_average(spec, finishes):
    """It would answer with its old model, and then forget how far it has come."""
    model = Vector()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = laconic.distribute(model, plain, spec)
    bound = optimizer.controller.bound
    asked = getattr(bound, "_base", bound)
    adopt_ = asked.adopt_

    def late(model):
        time.sleep(0.5 if dist.get_rank() == 0 else 0.0)
        adopt_(model)

    asked.adopt_ = late
    for step in range(8):  # rank 1 asks at the first and the fifth
        pull = -10.0 * dist.get_rank() if step in (1, 2) else 0.0
        model.x.grad = torch.full((5,), pull / 2)
        optimizer.step()
        if step + 1 in finishes:
            optimizer.finish()
    end = flat(model)
    optimizer.remove()
    torch.testing.assert_close(end, torch.full((5,), 5.0))


def trains():
    model, optimizer = trained("adpsgd()", steps=8)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.finish()
    same = agree(model)
    optimizer.remove()
    return same, optimizer.stats().payload_sent


def test_state_is_saved_and_loaded_and_bytes_are_counted(pool):
    results = pool.run(2, trains)
    assert all(same for same, _ in results)
    assert all(sent > 0 for _, sent in results)


def test_edges_join_odd_and_even_ranks():
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for spec in ("adpsgd()", "adpsgd(topology=ring())", "adpsgd(topology=exponential())"):
        for size in (2, 5, 8):
            parse(spec).check(size, optimizer)
    with pytest.raises(SpecError, match="no path leads from rank 0 to rank 2"):
        parse("adpsgd(topology=graph(edges=((0, 1), (0, 2), (2, 4), (4, 1), (3, 0))))").check(5, optimizer)
    with pytest.raises(SpecError, match="the number of ranks"):
        parse("adpsgd()").check(1, optimizer)
