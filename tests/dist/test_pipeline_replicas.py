"""Replicas of a pipeline: activations compressed between stages, gradients between replicas."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import NonFiniteError
from tests.dist.pipelines import LONG, SAMPLES, TESTED, WIDE, block, check_sides, data, loss_fn

pytestmark = TESTED


def grid():
    """Ranks 0, 1 and 2, 3 are pipelines, ranks 0, 2 and 1, 3 replicas of a stage: this rank's groups."""
    rank = dist.get_rank()
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return pipelines[rank // 2], replicas[rank % 2], rank % 2, rank // 2


def replicated(spec, steps, bad):
    """Whether replicas are equal after some steps, the buffers' digests, the loss, and what went wrong."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    pipeline, replicas, index, replica = grid()
    model = DistributedDataParallel(
        nn.Sequential(block(2 * index), block(2 * index + 1)), process_group=replicas
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    gradients = laconic.compress(model, optimizer, spec)
    part = torch.zeros(2, LONG, WIDE)  # torch infers shapes by passes that DistributedDataParallel counts
    shapes = {
        "input_args": part.clone().requires_grad_(index == 1),
        "output_args": part.clone().requires_grad_(),
    }
    stage = PipelineStage(model, index, 2, torch.device("cpu"), group=pipeline, **shapes)
    schedule = Schedule1F1B(stage, 2, loss_fn=loss_fn)
    handle = laconic.pipeline.compress(
        schedule, "ac_sgd(forward=4, backward=8)", samples=SAMPLES, group=dist.group.WORLD
    )
    inputs, targets = data()
    losses, said = [], None
    for step in range(steps):
        ids = torch.arange(replica, SAMPLES, 2).roll(4 * step)[:4]
        x = inputs[ids] * (float("nan") if step == bad and replica == 1 else 1)
        losses = []
        try:
            handle.step(
                *([x] if index == 0 else []),
                samples=ids,
                **({"target": targets[ids], "losses": losses} if index == 1 else {}),
            )
        except NonFiniteError as error:
            said = str(error)
        else:
            optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    other = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(other, weights, group=replicas)
    digests = {f"{replica}: {name}": value for name, value in handle.digests().items()}
    sent = gradients.stats().payload_sent
    return torch.equal(*other), digests, [each.item() for each in losses], said, sent


@pytest.mark.parametrize("spec", ["cgx(min_size=64)", "onebit_adam(warmup_steps=4)"])
def test_gradients_of_replicas_are_compressed_by_any_method(pool, spec):
    found = pool.run(4, replicated, spec, 12, None)
    for same, _, losses, said, sent in found:
        assert same and said is None and sent > 0
        assert all(loss < 5 for loss in losses)
    for replica in (0, 1):
        own = [digests for _, digests, *_ in found[2 * replica : 2 * replica + 2]]
        check_sides([{name.partition(": ")[2]: value for name, value in each.items()} for each in own])


def test_what_fails_in_one_replica_is_told_in_all(pool):
    found = pool.run(4, replicated, "cgx(min_size=64)", 6, 3)
    assert all(same and said is not None and "rank 2" in said for same, _, _, said, _ in found)
