"""Many buckets in flight over gloo: no hang, and replicas that stay bit-identical.

This is where PyTorch's own PowerSGD hook hangs: it waits for a second collective inside a Future's callback.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.dist.nets import agree, net
from tests.dist.runs import advance
from tests.dist.two_rounds import TwoRounds

SPECS = ("two rounds", "dgc(density=0.01, warmup_steps=50)")


def long_run(which: str, steps: int) -> tuple[int, bool]:
    """Buckets of about 0.1 MB; how many there were, and whether replicas agree."""
    model = DistributedDataParallel(net(width=165, depth=13), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    handle = laconic.compress(model, optimizer, TwoRounds() if which == "two rounds" else which)
    advance(model, optimizer, steps)
    return handle.stats().buckets, agree(model) and handle.stats().steps == steps


def check(pool, which: str, size: int, steps: int) -> None:  # type: ignore[no-untyped-def]
    for buckets, same in pool.run(size, long_run, which, steps, timeout_s=240):
        assert buckets >= 12
        assert same


@pytest.mark.parametrize(
    ("which", "size", "steps"), [(SPECS[0], 2, 60), pytest.param(SPECS[1], 4, 200, marks=pytest.mark.soak)]
)
def test_many_buckets_do_not_hang(pool, which, size, steps):
    check(pool, which, size, steps)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [2, 4])
def test_twenty_times(pool, size):
    for _ in range(20):
        check(pool, SPECS[0], size, steps=200)
