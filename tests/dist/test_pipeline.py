"""Laws of compressed pipelines, in real processes over gloo."""

from __future__ import annotations

import pytest
import torch

from tests.dist.pipelines import SAMPLES, SCHEDULES, trained

CASES = [(kind, size) for kind in (*SCHEDULES, "ZBVZeroBubble") for size in (2, 4)]


def dense(kind):
    """Weights of torch's own pipeline and of one that sends everything as it is, and the bytes."""
    plain, plain_losses, _ = trained(kind, 6)
    ours, losses, handle = trained(kind, 6, forward="dense()", backward="dense()")
    stats = handle.stats()
    handle.remove()
    return torch.equal(plain, ours), plain_losses == losses, stats


@pytest.mark.parametrize("kind, size", CASES)
def test_dense_is_bit_equal_to_the_plain_schedule(pool, kind, size):
    for same, equal_losses, stats in pool.run(size, dense, kind):
        assert same and equal_losses
        assert stats.steps == 6
        assert stats.forward_sent + stats.backward_sent > stats.dense_forward + stats.dense_backward


def sides(kind, steps, options):
    handle = trained(kind, steps, samples=SAMPLES, **options)[2]
    return handle.digests(), handle.stats()


def check_sides(found):
    """Every boundary has two sides, and they are equal."""
    both = {}
    for digests, _ in found:
        for name, digest in digests.items():
            both.setdefault(name.split()[0], []).append(digest)
    assert both and all(len(pair) == 2 and pair[0] == pair[1] != "" for pair in both.values())


@pytest.mark.parametrize("kind, size", CASES)
def test_both_sides_of_a_boundary_are_equal_bit_for_bit(pool, kind, size):
    found = pool.run(
        size, sides, kind, 12, {"forward": "change(minmax(bits=2))", "backward": "minmax(bits=8)"}
    )
    check_sides(found)
    assert all(stats.changes > stats.first_visits > 0 for _, stats in found)
