"""Sparse methods through servers: what a rank sends hardly grows with the group, and nothing is lost."""

from __future__ import annotations

import pytest
import torch
from benchmarks.methods.payload import traffic
from benchmarks.through_servers import __main__ as through_servers
from benchmarks.through_servers.page import MOST, growth
from tests.laws.worlds import Settings
from tests.unit.shared import for_each, refuses

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.exchange.attached import Attached
from laconic.exchange.method import lift

MODEL = Layout.of([("a.weight", (500, 500)), ("b.weight", (300, 300)), ("c.weight", (100, 600))])
TOPK = "sparse(topk(density=0.01), indices=golomb())"
SPECS = ("dgc(density=0.01, down=0.01)", "stc(density=0.02, down=0.02)", f"server({TOPK}, {TOPK})")


def sent(spec: str, size: int, steps: int = 2) -> int:
    """Bytes of messages from the busiest rank, in all steps."""

    def one(comm: Loopback) -> int:
        metered = Metered(comm)
        exchange = Attached(lift(spec), MODEL, metered, Settings())
        rng = torch.Generator().manual_seed(comm.rank)
        for _ in range(steps):
            exchange.begin()
            exchange.mean_(torch.randn(MODEL.numel, generator=rng), MODEL)
            exchange.end()
        return metered.snapshot().bare_sent

    return max(Loopback.run(size, one, timeout_s=300.0))


@pytest.mark.nightly
@for_each("spec", SPECS)
def test_64_ranks_send_at_most_twice_what_4_send(spec: str) -> None:
    """A gather sends 21 times as much."""
    assert sent(spec, 64) <= 2 * sent(spec, 4)


def test_the_answer_of_a_warm_up_is_as_dense_as_its_messages() -> None:
    spec = lift("dgc(density=0.01, down=0.02, warmup_steps=4, warmup=(0.5, 0.1))")

    def one(comm: Loopback) -> list[float]:
        exchange, shares = Attached(spec, MODEL, Metered(comm), Settings()), []
        for step in range(6):
            bucket = torch.randn(MODEL.numel, generator=torch.Generator().manual_seed(step))
            exchange.begin()
            exchange.mean_(bucket, MODEL)
            exchange.end()
            shares.append(int(bucket.count_nonzero()) / MODEL.numel)
        return shares

    for shares in Loopback.run(2, one):
        assert shares == pytest.approx([0.5, 0.5, 0.1, 0.1, 0.02, 0.02], rel=0.4)
    for wrong in (0, 1.5, -0.1):
        refuses(SpecError, "dgc: down", lift, f"dgc(down={wrong})")


@for_each("spec", through_servers.SPECS)
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
