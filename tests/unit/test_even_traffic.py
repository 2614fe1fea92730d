"""Forms of sparse methods whose bytes do not grow with the group, where an all-gather's grow N - 1 times."""

from __future__ import annotations

import pytest
import torch
from benchmarks.scaling_rank import Messages

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.core.turn import Turn
from laconic.exchange.method import lift

LAYOUT = Layout.of([("a", (1024, 1024)), ("b", (64, 64))])  # a piece for each of 64 ranks


def busiest(spec: str, size: int) -> int:
    """Bytes of messages that a rank sends in a step, the most of any."""
    reducer = lift(spec).routes[0].reducer

    def play(comm: Loopback) -> int:
        meter = Metered(comm, link=Messages())
        bound = reducer.bind(LAYOUT, meter)
        gradient = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(comm.rank))
        meter.reset()
        bound.reduce(gradient, LAYOUT, Turn(0, comm.rank), torch.empty(LAYOUT.numel))
        return meter.snapshot().network_sent

    return max(Loopback.run(size, play, timeout_s=120.0))


@pytest.mark.parametrize(
    "spec", ["dgc(density=0.01, down=0.01)", "stc(density=0.01, down=0.01)", "oktopk(density=0.01)"]
)
def test_bytes_among_64_are_at_most_twice_those_among_4(spec):
    assert busiest(spec, 64) <= 2 * busiest(spec, 4)


def test_those_of_a_gather_grow_with_the_group():
    assert busiest("dgc(density=0.01)", 16) > 4 * busiest("dgc(density=0.01)", 4)
