"""Clipping by the norm of a rank's whole gradient, however it is cut in buckets."""

from __future__ import annotations

import math

import pytest
import torch
from tests.laws.worlds import MODEL, Settings, cut, everywhere, exchange_on, gradient, one_step
from torch import Tensor

from laconic.comm.loopback import Loopback

CLIPPED = "dgc(density=0.9999, clip=1.0)"  # of these tensors all entries but one or none
MANY = cut(MODEL, 1, 2, 1)


def means(spec: str, gradients: list[Tensor], buckets: list, size: int = 4) -> list[Tensor]:  # type: ignore[type-arg]
    """The mean of each step, where all ranks have the same gradients and no momentum."""

    def play(comm: Loopback) -> list[Tensor]:
        exchange = exchange_on(comm, spec, Settings(momentum=0.0))
        return [one_step(exchange, flat.clone(), buckets)[0] for flat in gradients]

    return everywhere(size, play)[0]


def test_in_one_bucket_the_whole_norm_is_exact() -> None:
    """Of 4 ranks each is limited to 1 / 2, vectors and all, in one direction; smaller gradients pass."""
    grad = gradient(0, 0)
    small = grad * (0.3 / grad.norm())
    for flat, mean in zip((grad, small), means(CLIPPED, [grad, small], [MODEL]), strict=True):
        expected = flat * min(1.0, 0.5 / float(flat.norm()))
        lost = 2 * expected.abs().max()  # entries that are not sent yet
        assert float((mean - expected).norm()) <= lost
    assert float(means(CLIPPED, [grad], [MODEL])[0].norm()) == pytest.approx(0.5, rel=0.05)


def test_all_tensors_are_limited_together() -> None:
    """Not each by itself, which would leave a norm of 10 times the limit for 100 tensors; vectors too."""
    mean = means(CLIPPED, [gradient(0, 0)], [MODEL], size=1)[0]
    assert 0.9 < float(mean.norm()) <= 1 + 1e-5
    vectors = [entry for entry in MODEL if len(entry.shape) < 2 and entry.numel]
    whole = gradient(0, 0)
    for entry in vectors:
        own = slice(entry.offset, entry.offset + entry.numel)
        torch.testing.assert_close(mean[own], whole[own] / whole.norm(), rtol=1e-5, atol=1e-8)


def test_from_the_second_step_on_buckets_do_not_matter() -> None:
    """A gradient that changes in length alone: the last step tells the rest exactly."""
    lengths = [1.0, 7.0, 0.2, 1e6, 3.0]
    gradients = [gradient(0, 0) * length for length in lengths]
    one, many = means(CLIPPED, gradients, [MODEL]), means(CLIPPED, gradients, MANY)
    for a, b in list(zip(one, many, strict=True))[1:]:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_first_step_goes_by_what_has_come_so_far() -> None:
    """Each bucket's share is within the limit."""
    mean = means(CLIPPED, [gradient(0, 0) * 1e3], MANY)[0]
    for bucket in MANY:
        share = sum(float(mean[MODEL[n].offset :][: MODEL[n].numel].square().sum()) for n in bucket.names)
        assert math.sqrt(share) <= 0.5 + 1e-5


def test_a_resumed_run_clips_alike_and_a_void_step_changes_nothing() -> None:
    def play(comm: Loopback) -> bool:
        first, other = (exchange_on(comm, CLIPPED, Settings(momentum=0.0)) for _ in range(2))
        for step in range(2):
            one_step(first, gradient(comm.rank, step), MANY)
        before = first.state_dict()
        spoilt = gradient(comm.rank, 2)
        spoilt[5] = torch.inf if comm.rank else spoilt[5]
        assert not one_step(first, spoilt, MANY)[1]
        after = first.state_dict()
        clip = [key for key in before if key.startswith("clip/")]
        assert len(clip) == len(MODEL) and all(torch.equal(before[key], after[key]) for key in clip)
        other.load_state_dict(after, step=first.step)
        return torch.equal(*(one_step(each, gradient(comm.rank, 3), MANY)[0] for each in (first, other)))

    assert everywhere(2, play) == [True, True]


def test_dense_steps_are_not_clipped() -> None:
    spec = "dgc(density=0.9999, clip=1.0, warmup_steps=2, warmup=[1.0])"
    given = [gradient(0, 0)] * 3
    first, second, third = means(spec, given, [MODEL], size=1)
    assert torch.equal(first, given[0]) and torch.equal(second, given[0])
    assert float(third.norm()) <= 1 + 1e-5


def test_a_bucket_that_was_nearly_zero_tells_nothing_about_the_rest() -> None:
    """A layer that starts at zero wakes up: the gradient stays far below its limit, and is sent whole."""
    asleep, awake = (0.05 / gradient(0, 0).norm() * gradient(0, 0) for _ in range(2))
    parts = [slice(MODEL[each.name].offset, MODEL[each.name].offset + each.numel) for each in MANY[0]]
    for part in parts:
        asleep[part] *= 1e-9
    mean = means(CLIPPED, [asleep, awake], MANY, size=1)[1]
    for part in parts:
        assert float(mean[part].norm()) > 0.8 * float(awake[part].norm())
