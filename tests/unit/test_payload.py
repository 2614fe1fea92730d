"""What a step of ResNet-50 costs on the wire, in bytes that were really encoded."""

from __future__ import annotations

import pytest
import torch
from tests.laws.worlds import Settings
from tests.unit.resnet import resnet50

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.exchange.exchange import Exchange
from laconic.exchange.method import lift


def payload(spec: str) -> tuple[int, int]:
    """Bytes of one step's payload, and the bound that the method states."""
    layout = resnet50()
    gradient = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    comm = Metered(Loopback.world(1)[0])
    exchange = Exchange(lift(spec), layout, comm, Settings())
    exchange.begin()
    exchange.mean_(gradient, layout)
    exchange.end()
    return comm.snapshot().payload_sent, lift(spec).nbytes(layout)


def test_the_shapes_are_resnet50() -> None:
    layout = resnet50()
    assert (len(layout), layout.numel) == (161, 25_557_032)
    assert payload("dense()") == (102_228_128, 102_228_128)


@pytest.mark.parametrize(
    ("spec", "megabytes"),
    [
        ("dgc(density=0.001)", 0.36),
        ("dgc(density=0.001, values=cast('fp16'), vectors='fp16')", 0.20),
    ],
)
def test_dgc_sends_a_thousandth(spec: str, megabytes: float) -> None:
    """The paper's 0.35 MB for 97 MiB; and fewer bits for values and vectors."""
    sent, most = payload(spec)
    assert sent <= most
    assert sent <= megabytes * 1e6
    assert sent >= 0.8 * megabytes * 1e6, "it does send what it should"
