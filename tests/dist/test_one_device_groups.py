"""Groups that take the tensors of one device, as NCCL's do: control messages, which are on the host, arrive.

A backend that is registered for `cuda` alone stands for NCCL here: its groups refuse tensors on the host, and
need no GPU. The models stay on the host, so all that Laconic sends must go through groups that it made.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.comm.metered import Metered
from laconic.comm.torch_comm import TorchComm
from laconic.strategies.strategy import Strategy
from tests.dist.nets import SGD, agree, flat, momentum_for, net
from tests.dist.pool import on_ranks
from tests.dist.runs import advance
from tests.laws.strategy_ranks import fits
from tests.laws.table import specs

STRATEGIES = [spec for spec in specs(Strategy) if fits(spec, 2)]
METHODS = ("topk(density=0.1)", "cgx(bits=4, min_size=100)", "powersgd(rank=2)", "fp16()")


def stand_in() -> dist.ProcessGroup:
    """All ranks, for tensors on a GPU only."""
    if "standin" not in dist.Backend.backend_list:
        dist.Backend.register_backend("standin", gloo, devices=["cuda"])
    return dist.new_group(backend="standin")


def gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """What the stand-in is made of."""
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


@on_ranks(2)
def test_the_stand_in_refuses_tensors_on_the_host():
    group = stand_in()
    dist.barrier()  # a rank that leaves earlier would close the connection that the other one is making
    with pytest.raises(RuntimeError, match="cpu"):
        dist.all_reduce(torch.zeros(1), group=group)


def every_collective():
    """Of a group, of one split off it and of one made of some of its ranks."""
    own = TorchComm.own(stand_in())
    found = []
    for comm in (own, own.split(0), TorchComm.among([0, 1], "one device", own)):
        mine = torch.tensor([comm.rank + 1])
        metered, into = Metered(comm), torch.zeros(1, dtype=torch.int64)
        comm.exchange({1 - comm.rank: mine}, {1 - comm.rank: into})
        found.append(
            [
                metered.all_reduce(mine.clone()).item(),
                metered.all_reduce(mine.clone(), "max").item(),
                torch.cat(metered.all_gather(mine)).tolist(),
                torch.cat(metered.all_to_all([mine, mine])).tolist(),
                metered.reduce_scatter([mine.clone(), mine.clone()]).item(),
                metered.broadcast(mine.clone(), 1).item(),
                into.item(),
            ]
        )
    own.close()
    return found


def test_every_collective_takes_control_messages(pool):
    for rank, found in enumerate(pool.run(2, every_collective)):
        assert found == [[3, 2, [1, 2], [1, 2], 3, 2, 2 - rank]] * 3


@on_ranks(2)
def test_every_strategy_attaches_and_trains():
    group, done = stand_in(), []
    for spec in STRATEGIES:
        model = net()
        plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum_for(spec))
        model, optimizer = laconic.distribute(model, plain, spec, group=group)
        advance(model, optimizer, 3)
        optimizer.finish()
        assert agree(model), spec
        optimizer.remove()
        done.append(spec)
    assert done == STRATEGIES


@on_ranks(2)
def test_methods_attach_and_train():
    group, ends = stand_in(), []
    for spec in METHODS:
        model = DistributedDataParallel(net())
        model.process_group = group  # what compress is told; DDP's own messages go on as they were
        optimizer = torch.optim.SGD(model.parameters(), **SGD)
        handle = laconic.compress(model, optimizer, spec)
        advance(model, optimizer, 3)
        ends.append((agree(model), torch.equal(flat(model), flat(net()))))
        handle.remove()
    assert ends == [(True, False)] * len(METHODS)
