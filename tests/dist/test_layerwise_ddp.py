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

ALL = (
    *("dense()", "fp16()", "topk(density=0.05)", "randomk(density=0.05)", "terngrad()", "qsgd(levels=7)"),
    *("natural()", "sign()", "stc(density=0.05, down=0.05)", "majority_vote()", "powersgd(rank=2)"),
    *("cgx(bits=4)", "deft(density=0.05)"),
)
MOMENTUM = ("dgc(density=0.05)", "dgc(density=0.05, warmup=(1.0, 0.1), warmup_steps=4)", "signum()")


def trained(make: str, spec: str, steps: int = 8) -> tuple[float, float, bool]:
    model = DistributedDataParallel(net())
    kinds = {"lars": (LARS, {"lr": 0.1, "trust": 0.02, "weight_decay": 1e-3}), "lamb": (LAMB, {"lr": 0.01})}
    kind, settings = kinds[make]
    optimizer = kind(model.parameters(), **settings)  # type: ignore[operator]
    compress_anyway(model, optimizer, spec)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step % 2)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[0], losses[-1], agree(model)


def several(make: str, specs: tuple[str, ...]) -> dict[str, tuple[float, float, bool]]:
    return {spec: trained(make, spec) for spec in specs}


@pytest.mark.parametrize(("make", "specs"), [("lars", ALL + MOMENTUM), ("lamb", ALL)])
def test_they_train_with_every_method(pool: Any, make: str, specs: tuple[str, ...]) -> None:
    for found in pool.run(2, several, make, specs, timeout_s=240):
        for spec, (first, last, equal) in found.items():
            assert equal, spec
            assert last < first, spec


def against_one_process(make: str) -> tuple[torch.Tensor, torch.Tensor]:
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
    return flat(model), flat(alone)


@pytest.mark.parametrize("make", ["lars", "lamb"])
def test_the_trust_ratio_sees_the_mean(pool: Any, make: str) -> None:
    for compressed, alone in pool.run(2, against_one_process, make):
        torch.testing.assert_close(compressed, alone, rtol=1e-5, atol=1e-6)


def refused() -> list[str]:
    model = DistributedDataParallel(net())
    said = []
    for spec in ("dgc(density=0.05)", "onebit_adam(warmup_steps=2)"):
        with warnings.catch_warnings(), pytest.raises(AttachError) as error:
            warnings.simplefilter("ignore")
            laconic.compress(model, LAMB(model.parameters()), spec)
        said.append(str(error.value))
    return said


def test_lamb_is_refused_by_methods_that_are_another_optimiser(pool: Any) -> None:
    momentum, adam = pool.run(2, refused)[0]
    assert "laconic.optim.LARS" in momentum
    assert "Adam" in adam
