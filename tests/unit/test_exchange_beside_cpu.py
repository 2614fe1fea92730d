"""The exchange as on a GPU: flags read late, products in batches. Played with CPU tensors that deny it."""

from __future__ import annotations

import pytest
import torch
from tests.laws.worlds import MODEL, cut, everywhere, exchange_on, gradient, one_step
from tests.unit.shared import for_each, refuses
from torch.utils._python_dispatch import TorchDispatchMode

from laconic import kernels
from laconic.core.errors import WireError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.ddp.gradient_watch import GradientWatch

SPECS = ("powersgd(rank=2)", "powersgd(rank=3)", "fp16()", "cgx(bits=4)", "sum(dtype='bf16')")


@pytest.fixture
def elsewhere(monkeypatch):
    """Every tensor says that it is not on the CPU, so that code takes its paths for a GPU."""
    with kernels.using("reference"):
        yield lambda: monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False), raising=False)


def played(spec, void_at=None):
    """Means of four steps on 2 ranks, with whether each step counts, and the state after them."""

    def play(comm):
        exchange, buckets, found = exchange_on(comm, spec), cut(MODEL, 1, 2, 1), []
        for step in range(4):
            flat = gradient(comm.rank, step)
            if step == void_at and comm.rank == 1:
                flat[MODEL.numel // 2] = torch.inf
            mean, counts = one_step(exchange, flat, buckets)
            found.append((mean.clone(), counts))
        return found, exchange.state_dict()

    return everywhere(2, play)


@for_each("void_at", [None, 1])
@for_each("spec", SPECS)
def test_means_and_memory_are_those_of_the_cpu(spec, void_at, elsewhere):
    here = played(spec, void_at)
    elsewhere()
    there = played(spec, void_at)
    for (expected, kept), (found, held) in zip(here, there, strict=True):
        for step, ((mean, counts), (other, also)) in enumerate(zip(expected, found, strict=True)):
            assert counts == also == (step != void_at)
            torch.testing.assert_close(other, mean, rtol=1e-3, atol=1e-3, equal_nan=True)
        assert kept.keys() == held.keys()
        for key, value in kept.items():
            torch.testing.assert_close(held[key], value, rtol=1e-3, atol=1e-4)
    for (mean, _), (other, _) in zip(*(found for found, _ in there), strict=True):
        assert torch.equal(mean.nan_to_num(7.0), other.nan_to_num(7.0))


def test_a_direction_that_died_is_started_anew(elsewhere):
    """The host knows where columns are zero without looking at them at every step."""
    layout = Layout.of([("w", (40, 30))])
    rng = torch.Generator().manual_seed(0)
    low = torch.randn(40, 2, generator=rng) @ torch.randn(2, 30, generator=rng)

    def play(comm):
        reducer, off = parse("powersgd(rank=2)").bind(layout, comm), []
        for t, x in enumerate((low * 0, low, low, low * 0, low)):
            x, out = x.flatten().contiguous(), torch.empty(1200)
            assert reducer.reduce(x, layout, Turn(t), out) is not None
            off.append(float((out - x).norm()) <= 1e-4 * float(x.norm()))
        return off

    elsewhere()
    assert everywhere(1, play) == [[True] * 5]


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal")
        return func(*args, **(kwargs or {}))


@for_each("spec, most", [("sum()", 1), ("powersgd(rank=2)", 4)])
def test_few_waits_a_bucket(spec, most, elsewhere):
    """Each number that is read counts here, not each copy: PowerSGD reads three numbers in one copy."""
    layout = Layout.of([(f"w{i}", (40, 30 + i % 3)) for i in range(20)])

    def play(comm):
        reducer = parse(spec).bind(layout, comm)
        for t in range(3):
            x = gradient(0, t, layout)
            with Waits() as waits:
                assert reducer.reduce(x, layout, Turn(t), torch.empty_like(x)) is not None
        return waits.count

    elsewhere()
    assert everywhere(1, play)[0] <= most


def test_a_damaged_message_still_fails_the_exchange(elsewhere, monkeypatch):
    def play(comm):
        exchange, flat = exchange_on(comm, "gather(minmax(bits=4))"), gradient(comm.rank, 0)
        gather = comm.all_gather

        def damaged(x):
            return [each[:-1] for each in gather(x)]

        exchange.comm.comm.all_gather = damaged
        one_step(exchange, flat, [MODEL])

    elsewhere()
    refuses(WireError, "the message that rank 0 sent is damaged", everywhere, 1, play)


def test_a_changed_gradient_is_found_a_step_later(elsewhere):
    elsewhere()
    reasons = []
    watch = GradientWatch(lambda reason, advice, kept: reasons.append(reason))
    layout, grad = Layout.of([("w", (4,))]), torch.ones(4)
    for earlier in range(2):
        assert len(reasons) == 0, earlier
        watch.note(grad, layout, ["w"], 1.0, remembers=True)
        watch.compare("w", grad / 2, 1.0)
    assert len(reasons) == 1 and "the gradient of w was changed" in reasons[0]
