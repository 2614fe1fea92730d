"""The order of checks before an optimiser's step: what makes a step impossible comes first."""

from __future__ import annotations

import pytest
import torch

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.errors import AttachError, NonFiniteError, PeerError
from laconic.core.mask import Mask, set_mask
from laconic.ddp.handle import Handle
from laconic.exchange.method import lift


class Noting:
    """An observer that notes its calls."""

    def __init__(self):
        self.calls = 0

    def before_step(self, optimiser, step):
        self.calls += 1


def attached(spec, kind=torch.optim.SGD):
    """A handle on one rank, its weight, its optimiser, and an observer that comes first."""
    weight = torch.nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.ones(4, 4)
    optimizer = kind([weight], lr=0.1)
    handle = Handle(lift(spec), {weight: "weight"}, optimizer, Metered(Loopback.world(1)[0]))
    noting = Noting()
    handle.exchange.observers.insert(0, noting)
    return handle, weight, optimizer, noting


def test_a_failed_exchange_is_reported_before_a_skipped_step_and_before_observers():
    handle, weight, optimizer, noting = attached("topk(density=0.5)")

    def fails():
        raise PeerError("rank 1 has ended")

    try:
        handle.exchange.skip_reason = "weight"
        with pytest.raises(NonFiniteError):
            optimizer.step()
        answer = handle.buckets._thread.submit(fails)
        with pytest.raises(PeerError):
            handle.buckets.wait(answer)
        with pytest.raises(PeerError, match="the exchange has failed: rank 1 has ended"):
            optimizer.step()
        handle.exchange.skip_reason = None
        with pytest.raises(PeerError, match="the exchange has failed: rank 1 has ended"):
            optimizer.step()
        assert not noting.calls and bool((weight == 1).all())
    finally:
        handle.abandon()


def test_masks_that_a_rule_cannot_follow_are_refused_at_each_step_before_observers():
    handle, weight, optimizer, noting = attached("onebit_adam(warmup_steps=2)", torch.optim.Adam)
    try:
        set_mask(weight, Mask.of(weight, torch.eye(4) > 0))
        for _ in range(2):
            with pytest.raises(AttachError, match=r"exchanges inside optimizer\.step\(\)"):
                optimizer.step()
        assert not noting.calls and bool((weight == 1).all())
        set_mask(weight, None)
        optimizer.step()
        assert noting.calls == 1
    finally:
        set_mask(weight, None)
        handle.abandon()
