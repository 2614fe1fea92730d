"""The figure of bytes: what a rank puts on the wire in a step, beside dense by all-reduce in its group."""

from __future__ import annotations

import pytest
import torch
from tests.laws.worlds import Settings
from tests.unit.resnet import resnet50
from tests.unit.shared import for_each
from torch import nn

from laconic.comm import wire_model
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.ddp.handle import Handle
from laconic.exchange.attached import Attached
from laconic.exchange.method import lift
from laconic.exchange.stats import Stats

SHAPES = {"first.weight": (500, 1000), "first.bias": (500,), "last.weight": (1000, 500)}
N = sum(torch.Size(shape).numel() for shape in SHAPES.values())


def stats(spec: str, size: int, steps: int = 2) -> list[Stats]:
    """Of every rank, after a few exchanges of the whole model in one bucket."""

    def one(comm: Loopback) -> Stats:
        names: dict[torch.Tensor, str] = {
            nn.Parameter(torch.zeros(shape)): name for name, shape in SHAPES.items()
        }
        handle = Handle(lift(spec), names, torch.optim.SGD(list(names), lr=0.1), Metered(comm))
        rng = torch.Generator().manual_seed(comm.rank)
        for _ in range(steps):
            handle.exchange.begin()
            handle.exchange.mean_(torch.randn(N, generator=rng), handle.layout)
            handle.exchange.end()
        return handle.stats()

    return Loopback.run(size, one)


@for_each("size", [2, 4, 16])
def test_dense_is_as_small_as_dense(size: int) -> None:
    for each in stats("dense()", size):
        assert each.ratio == 1.0
        assert each.dense == each.network_sent > each.payload_sent * 2 * (size - 1) / size


def test_a_gather_in_a_large_group_sends_more_than_dense() -> None:
    few, many = stats("qsgd()", 2)[0], stats("qsgd()", 16)[0]
    assert few.payload_sent == many.payload_sent
    assert few.ratio == pytest.approx(7.8, rel=0.05)
    assert many.ratio == pytest.approx(7.8 * 2 / 16, rel=0.05) and many.ratio < 1


def test_a_scatter_reduce_is_as_much_smaller_in_any_group() -> None:
    ratios = [stats("cgx()", size)[0].ratio for size in (2, 4, 16)]
    assert ratios == pytest.approx([7.5] * 3, rel=0.1)


def test_alone_nothing_is_sent_and_nothing_is_saved() -> None:
    (alone,) = stats("qsgd()", 1)
    assert alone.dense == alone.network_sent == 0 and alone.ratio == 1.0


def test_without_headers_the_bytes_are_those_of_the_messages() -> None:
    def one(comm: Loopback) -> int:
        metered = Metered(comm)
        metered.all_reduce(torch.zeros(1_000_000))
        metered.all_gather(torch.zeros(1000, dtype=torch.uint8))
        return metered.snapshot().bare_sent

    assert set(Loopback.run(4, one)) == {6_000_000 + 3 * (1000 + 8)}
    assert wire_model.all_reduce_bytes(4_000_000, 4) == 6_000_000


def payload(spec: str) -> tuple[int, int]:
    """Bytes of one step's payload, and the bound that the method states."""
    layout = resnet50()
    gradient = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    comm = Metered(Loopback.world(1)[0])
    exchange = Attached(lift(spec), layout, comm, Settings())
    exchange.begin()
    exchange.mean_(gradient, layout)
    exchange.end()
    return comm.snapshot().payload_sent, lift(spec).nbytes(layout)


def test_the_shapes_are_resnet50() -> None:
    layout = resnet50()
    assert (len(layout), layout.numel) == (161, 25_557_032)
    assert payload("dense()") == (102_228_128, 102_228_128)


def test_dgc_sends_a_thousandth() -> None:
    """The paper's 0.35 MB for 97 MiB; and fewer bits for values and vectors."""
    for spec, megabytes in (
        ("dgc(density=0.001)", 0.36),
        ("dgc(density=0.001, values=cast('fp16'), vectors='fp16')", 0.20),
    ):
        sent, most = payload(spec)
        assert 0.8 * megabytes * 1e6 <= sent <= min(most, megabytes * 1e6), spec
