"""What `stats().phases` calls the parts of an exchange is explained where `Stats` is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import laconic
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.exchange.exchange import Exchange
from laconic.exchange.method import lift
from laconic.exchange.stats import Stats
from laconic.plan.stage import StandIn

NAMED = re.compile(r'\.phase\(f?"([a-z ]+)')


def test_every_named_phase_is_explained() -> None:
    files = Path(laconic.__file__).parent.rglob("*.py")
    names = {name.strip() for path in files for name in NAMED.findall(path.read_text())}
    assert {"gossip", "leader", "sparse gradients", "parameters"} <= names
    unexplained = {name for name in names if f'"{name}' not in (Stats.__doc__ or "")}
    assert not unexplained


@pytest.mark.parametrize(
    ("spec", "phase"),
    [("fp16()", "sum(dtype='fp16') all_reduce"), ("qsgd()", "gather(qsgd()) all_gather")],
)
def test_what_a_method_sends_is_under_its_name(spec: str, phase: str) -> None:
    """What it agrees on before, such as fp16's scale, too."""
    layout = Layout.of([("weight", (4, 50))])

    def body(comm: Loopback) -> set[str]:
        metered = Metered(comm)
        exchange = Exchange(lift(spec), layout, metered, StandIn())
        exchange.begin()
        exchange.mean_(torch.randn(200), layout)
        exchange.end()
        return {" ".join(key) for key in metered.snapshot().parts}

    assert Loopback.run(2, body) == [{phase}] * 2
