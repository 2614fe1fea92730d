"""Two levels in real processes over gloo: 4 ranks as 2 machines."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import SpecError
from tests.dist.ddp_world import MANY, stop_and_go
from tests.dist.nets import SGD, agree, loss_of, net, train
from tests.dist.test_low_bits_ddp import overflow

TOPK = "gather(sparse(topk(density=0.05)))"
SPEC = f"two_level(sum(), {TOPK}, ranks_per_node=2)"


OUTER = [TOPK, "powersgd(rank=1)", "server(cast('bf16'), cast('bf16'))", "dgc(density=0.05, clip=1.0)"]


@pytest.mark.parametrize("outer", OUTER)
def test_replicas_stay_bit_identical(pool, outer):
    for _, same, stats in pool.run(4, train, f"two_level(sum(), {outer}, ranks_per_node=2)"):
        assert same and stats.steps == 6


def test_a_resumed_run_ends_with_the_same_bits(pool):
    for whole, resumed in pool.run(2, stop_and_go, SPEC):
        assert torch.equal(whole, resumed)


def test_inf_in_the_last_bucket_skips_the_step(pool):
    for each in pool.run(4, overflow, SPEC, 1):
        assert each.moved == [step != 1 for step in range(4)]
        assert each.scale == 512.0 and each.agreed


def told_by_torchrun(size):
    """A run with the environment of torchrun; what was sent, by kind of collective; and the same again."""
    rank, ours = dist.get_rank(), ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    before = {name: os.environ.get(name) for name in ours}
    for name, value in zip(ours, (rank, rank % size, size), strict=True):
        os.environ[name] = str(value)
    try:
        model = DistributedDataParallel(net(), **MANY)
        optimizer, sent = torch.optim.SGD(model.parameters(), **SGD), []
        for _ in range(2):
            handle = laconic.compress(model, optimizer, f"two_level(sum(), {TOPK})")
            loss_of(model, 0).backward()
            optimizer.step()
            phases = handle.stats().phases
            sent.append({key.rpartition(" ")[2]: n for key, n in phases.items() if "two_level" in key})
            handle.remove()
        return sent, agree(model)
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def test_only_leaders_meet_between_machines_of_torchrun(pool):
    """`remove` frees the groups, so that a model can be compressed again."""
    results = pool.run(4, told_by_torchrun, 2)
    for rank, (sent, same) in enumerate(results):
        assert same
        for each in sent:
            assert (each.get("all_gather", 0) > 0) == (rank % 2 == 0)
            assert each.get("all_gather", 0) <= 0.11 * each["all_reduce"]
            assert (each["broadcast"] > 0) == (rank % 2 == 0)


def refusals():
    model = DistributedDataParallel(net())
    optimizer, said = torch.optim.SGD(model.parameters(), **SGD), []
    for local in (3, 0):
        try:
            laconic.compress(model, optimizer, f"two_level(sum(), {TOPK}, ranks_per_node={local})")
        except SpecError as error:
            said.append(str(error))
    laconic.compress(model, optimizer, SPEC).remove()
    return said


def test_a_mesh_that_does_not_fit_is_refused_on_every_rank(pool):
    for rank, (first, second) in enumerate(pool.run(4, refusals)):
        assert "ranks_per_node=3 does not divide the 4 ranks" in first
        assert "rank 0 does not know its machine" in second, rank
