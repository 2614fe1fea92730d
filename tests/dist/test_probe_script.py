"""A probe of a script of one's own measures its training, and leaves it as it was."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import AttachError
from laconic.tools.plan import probe_script
from laconic.tools.plan.probe import Probe
from tests.dist.pool import on_ranks


def training():
    """A model with all that a step changes: momentum, running statistics, dropout, gradients."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(30, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 10))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(16, 30), torch.randint(0, 10, (16,))
    return wrapped, optimizer, lambda: nn.functional.cross_entropy(wrapped(x), y)


def run(probed):
    """The end of a training, and what was probed halfway."""
    model, optimizer, loss = training()
    found = None
    for step in range(6):
        if step == 3 and probed:
            found = probe_script(model, optimizer, loss, ["fp16()", "local_sgd(every=2)"])
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    momentum = [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]
    ends = [*model.state_dict().values(), *momentum, *(p.grad for p in model.parameters())]
    return torch.cat([each.flatten().double() for each in ends]), found


def both(path):
    plain, _ = run(probed=False)
    end, found = run(probed=True)
    found.write(path)
    return torch.equal(plain, end), found.json()


def test_a_training_goes_on_as_if_it_had_not_been_probed(pool, tmp_path):
    (same, first), (also, second) = pool.run(2, both, tmp_path / "probe.json", timeout_s=120)
    assert same and also and first == second
    found = Probe.load(tmp_path / "probe.json")
    assert found.size == 2 and len(found.pairs) == 1
    assert [each.spec for each in found.methods] == ["dense()", "fp16()", "local_sgd(every=2)"]
    assert 0 < found.work.backward_s < 60
    assert sum(4 * torch.Size(shape).numel() for _, shape in found.layout) == sum(found.work.buckets)


@on_ranks(2)
def test_what_cannot_be_probed_is_refused():
    model, optimizer, loss = training()
    other = nn.Linear(3, 3)
    _, taken = laconic.distribute(other, torch.optim.SGD(other.parameters(), lr=0.1), "local_sgd()")
    with pytest.raises(AttachError, match="probe it before"):
        probe_script(model, taken, loss)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with pytest.raises(AttachError, match="start 2 workers or more"):
        probe_script(model, optimizer, loss, group=alone)
    taken.remove()
