"""Low bits both ways in real processes over gloo: TernGrad, servers, and policies of several methods."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import SpecError
from tests.dist.ddp_world import MANY, spike, stop_and_go
from tests.dist.nets import SGD, agree, flat, loss_of, net

TOPK = "sparse(topk(density=0.05), indices=golomb())"
SERVER = f"server({TOPK}, {TOPK})"


@pytest.mark.parametrize("spec", ["terngrad()", SERVER])
def test_a_resumed_run_ends_with_the_same_bits(pool, spec):
    for whole, resumed in pool.run(2, stop_and_go, spec):
        assert torch.equal(whole, resumed)


def phases():
    width = 512
    model = DistributedDataParallel(torch.nn.Linear(width, width, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = laconic.compress(model, optimizer, "terngrad()")
    model(torch.randn(4, width)).square().mean().backward()
    optimizer.step()
    stats = handle.stats()
    return width * width, stats.phases, stats.network_sent


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_entry_goes_up_in_2_bits_and_down_in_log2_of_all_sums(pool, size):
    down_bits = math.ceil(math.log2(2 * size + 1))
    for n, phases_of, wire in pool.run(size, phases):
        up = phases_of["shared_scale() all_to_all"]
        down = phases_of["shared_scale() all_gather"]
        assert (up, down) == (2 * n // size * (size - 1) // 8, down_bits * n // size // 8)
        assert phases_of["shared_scale() all_reduce"] == 4
        # Each down-message goes to all others; headers and acknowledgements are under a tenth of all.
        assert up + down * (size - 1) <= wire <= 1.1 * (up + down * (size - 1)) + 4000 * size


class Overflown(NamedTuple):
    """`moved`, `same`: whether parameters were changed and servers' memories kept, step by step."""

    moved: list
    same: list
    holds: bool  # a server's memory something at the end
    agreed: bool  # all ranks on the parameters
    scale: float
    state: dict


def overflow(spec, when, steps=4):
    """Inf on rank 1 at one step, in the bucket that comes last: earlier ones have been exchanged by then."""
    model = DistributedDataParallel(net(), **MANY)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    handle = laconic.compress(model, optimizer, spec, scaler=scaler)
    parameters, servers = [flat(model)], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if step == when and dist.get_rank() == 1:
            loss = loss + spike(next(model.parameters()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        parameters.append(flat(model))
        state = handle.state_dict()["tensors"]
        assert all(bool(value.isfinite().all()) for value in state.values())
        servers.append([value for key, value in state.items() if "/once/server/" in key])
    same = [all(torch.equal(a, b) for a, b in zip(x, y, strict=True)) for x, y in pairwise(servers)]
    moved = [not torch.equal(a, b) for a, b in pairwise(parameters)]
    holds = any(bool(value.any()) for value in servers[-1])
    return Overflown(moved, same, holds, agree(model), scaler.get_scale(), state)


@pytest.mark.parametrize("when", [1, 2])
@pytest.mark.parametrize("spec", [SERVER, "terngrad()"])
def test_inf_in_the_last_bucket_skips_the_step_and_no_server_keeps_it(pool, spec, when):
    for each in pool.run(2, overflow, spec, when):
        assert each.moved == [step != when for step in range(4)]
        assert each.scale == 512.0 and each.agreed
        if spec == SERVER:
            assert each.holds and each.same == [step == when for step in range(1, 4)]


def slip_of_the_pen():
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    try:
        laconic.compress(model, optimizer, "by_name({'*wieght': bf16()}, rest=dense())")
    except SpecError as error:
        return str(error)
    return ""


def test_a_pattern_without_a_tensor_is_refused_on_every_rank(pool):
    for said in pool.run(2, slip_of_the_pen):
        assert "no tensor of this model matches '*wieght'" in said
