"""Bytes through servers by the size of a model: as an exchange among threads sends them."""

from __future__ import annotations

import pytest
import torch
from benchmarks import through_servers
from benchmarks.pages.through_servers import MOST, growth
from benchmarks.payload import traffic

from laconic.exchange.method import lift


@pytest.mark.parametrize("spec", through_servers.SPECS)
def test_a_step_has_the_bytes_of_an_exchange_among_threads(spec: str) -> None:
    """Within 5 %: the exchange has steps with memories, and the mean of 4 of them."""
    layout = through_servers.layouts(400_000)["4 square matrices"]
    gradients = {
        entry.name: torch.randn(entry.shape, generator=torch.Generator().manual_seed(i)) ** 3
        for i, entry in enumerate(layout)
    }
    for size in (4, 8):
        noise = through_servers.noise_of(layout, size)
        found = traffic(lift(spec), gradients, size, steps=4).sent
        assert through_servers.sent(spec, layout, noise, size) == pytest.approx(found, rel=0.05)


def test_growth_is_that_from_the_fewest_workers_to_the_most() -> None:
    assert growth({4: {"sent": 10}, 16: {"sent": 12}, 64: {"sent": 20}}) == MOST
