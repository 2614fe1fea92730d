"""LARS and LAMB under `laconic.compress`: replicas agree, and trust ratios see the mean."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.errors import AttachError
from laconic.optim import LAMB, LARS
from tests.dist.nets import agree, compress_anyway, flat, loss_of, net
from tests.dist.pool import on_ranks
from tests.dist.runs import advance

ALL = (
    *("dense()", "fp16()", "topk(density=0.05)", "randomk(density=0.05)", "terngrad()", "qsgd(levels=7)"),
    *("natural()", "sign()", "stc(density=0.05, down=0.05)", "majority_vote()", "powersgd(rank=2)"),
    *("cgx(bits=4)", "deft(density=0.05)"),
)
MOMENTUM = ("dgc(density=0.05)", "dgc(density=0.05, warmup=(1.0, 0.1), warmup_steps=4)", "signum()")


KINDS: dict[str, Any] = {
    "lars": (LARS, {"lr": 0.1, "trust": 0.02, "weight_decay": 1e-3}),
    "lamb": (LAMB, {"lr": 0.01}),
}
CASES = [*(("lars", spec) for spec in ALL + MOMENTUM), *(("lamb", spec) for spec in ALL)]


@on_ranks(2, CASES, timeout_s=300)
def test_they_train_with_every_method(make: str, spec: str) -> None:
    kind, settings = KINDS[make]
    model = DistributedDataParallel(net())
    optimizer = kind(model.parameters(), **settings)
    compress_anyway(model, optimizer, spec)
    first, *_, last = advance(model, optimizer, [0, 1] * 4)
    assert agree(model) and last < first


@on_ranks(2, ["lars", "lamb"])
def test_the_trust_ratio_sees_the_mean(make: str) -> None:
    """Two ranks, and one that has both batches: the trust ratio is that of the mean."""
    kind: Any = {"lars": LARS, "lamb": LAMB}[make]
    model = DistributedDataParallel(net())
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.01)
    laconic.compress(model, optimizer, "dense()")
    alone = net()
    own = kind(alone.parameters(), lr=0.1, weight_decay=0.01)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        own.zero_grad()
        loss_of(alone, step).backward()
        for parameter in alone.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        own.step()
    compressed, alone = flat(model), flat(alone)
    torch.testing.assert_close(compressed, alone, rtol=1e-5, atol=1e-6)


@on_ranks(2, (("signum()", r"laconic\.optim\.LARS"), ("onebit_adam(warmup_steps=2)", "Adam")))
def test_lamb_is_refused_by_methods_that_are_another_optimiser(spec: str, words: str) -> None:
    model = DistributedDataParallel(net())
    with warnings.catch_warnings(), pytest.raises(AttachError, match=words):
        warnings.simplefilter("ignore")
        laconic.compress(model, LAMB(model.parameters()), spec)
