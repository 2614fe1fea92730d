"""Sparse methods through servers: what a rank sends hardly grows with the group, and nothing is lost."""

from __future__ import annotations

import pytest
import torch
from tests.laws.worlds import Settings

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.exchange.exchange import Exchange
from laconic.exchange.method import lift

MODEL = Layout.of([("a.weight", (500, 500)), ("b.weight", (300, 300)), ("c.weight", (100, 600))])
TOPK = "sparse(topk(density=0.01), indices=golomb())"
SPECS = ("dgc(density=0.01, down=0.01)", "stc(density=0.02, down=0.02)", f"server({TOPK}, {TOPK})")


def sent(spec: str, size: int, steps: int = 2) -> int:
    """Bytes of messages from the busiest rank, in all steps."""

    def one(comm: Loopback) -> int:
        metered = Metered(comm)
        exchange = Exchange(lift(spec), MODEL, metered, Settings())
        rng = torch.Generator().manual_seed(comm.rank)
        for _ in range(steps):
            exchange.begin()
            exchange.mean_(torch.randn(MODEL.numel, generator=rng), MODEL)
            exchange.end()
        return metered.snapshot().bare_sent

    return max(Loopback.run(size, one, timeout_s=300.0))


@pytest.mark.parametrize("spec", SPECS)
def test_64_ranks_send_at_most_twice_what_4_send(spec: str) -> None:
    """A gather sends 21 times as much."""
    assert sent(spec, 64) <= 2 * sent(spec, 4)


def test_the_answer_of_a_warm_up_is_as_dense_as_its_messages() -> None:
    def one(comm: Loopback) -> list[int]:
        exchange = Exchange(
            lift("dgc(density=0.01, down=0.02, warmup_steps=4, warmup=(0.5, 0.1))"),
            MODEL,
            Metered(comm),
            Settings(),
        )
        changed = []
        for step in range(6):
            bucket = torch.randn(MODEL.numel, generator=torch.Generator().manual_seed(step))
            exchange.begin()
            exchange.mean_(bucket, MODEL)
            exchange.end()
            changed.append(int(bucket.count_nonzero()))
        return changed

    for changed in Loopback.run(2, one):
        shares = [count / MODEL.numel for count in changed]
        assert shares == pytest.approx([0.5, 0.5, 0.1, 0.1, 0.02, 0.02], rel=0.4)


@pytest.mark.parametrize("wrong", [0, 1.5, -0.1])
def test_the_density_of_the_answer_is_checked(wrong: float) -> None:
    with pytest.raises(SpecError, match="dgc: down"):
        lift(f"dgc(down={wrong})")
