"""Server: both directions compressed, nothing lost, and no rank through which all goes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tests.laws.worlds import MODEL, cut, everywhere, exchange_on, gradient, one_step

import laconic
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.errors import SpecError, WireError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.core.tensor_codec import TensorCodec
from laconic.core.turn import Turn
from laconic.exchange.method import Route, everything, routes
from laconic.reducers.server.deal import homes

STC = "server(sparse(topk(density=0.1)), sparse(topk(density=0.05)))"
SPECS = (
    STC,
    "server(cast('bf16'), cast('bf16'))",
    "server(sparse(topk(density=0.05), indices=golomb()), dense())",
    "server(sparse(randomk(density=0.1)), sparse(topk(density=0.05)))",
)
SIZES = (1, 2, 4, 5)
STEPS = 6
MATRICES = [entry for entry in MODEL if len(entry.shape) > 1]


def twin(spec, size, steps=STEPS):
    """The same in plain words: one server that sees each matrix of all ranks. The means of every step."""
    reducer, means = parse(spec), []
    kept = {
        (who, entry.name): torch.zeros(entry.numel) for who in (*range(size), "server") for entry in MATRICES
    }
    for t in range(steps):
        mean = torch.zeros(MODEL.numel)
        for entry in MATRICES:
            where = slice(entry.offset, entry.offset + entry.numel)
            x = kept["server", entry.name]
            for rank in range(size):
                own = kept[rank, entry.name] + gradient(rank, t)[where]
                wire = reducer.up.encode(own, Turn(t).common(entry.name))
                kept[rank, entry.name] = own - reducer.up.decode(wire, entry.numel)
                reducer.up.decode_add_(wire, x, 1 / size)
            mean[where] = reducer.down.decode(reducer.down.encode(x), entry.numel)
            kept["server", entry.name] = x - mean[where]
        means.append(mean)
    return means


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("size", SIZES)
def test_it_does_what_one_server_would(spec, size):
    def play(comm):
        exchange, buckets = exchange_on(comm, spec), cut(MODEL, 1, 2, 1)
        return [one_step(exchange, gradient(comm.rank, t), buckets)[0] for t in range(STEPS)]

    for means in everywhere(size, play):
        for mean, expected in zip(means, twin(spec, size), strict=True):
            for entry in MATRICES:
                where = slice(entry.offset, entry.offset + entry.numel)
                assert torch.equal(mean[where], expected[where]), entry.name


def test_a_tensor_is_served_by_one_rank_however_buckets_are_cut():
    def play(comm):
        exchange = exchange_on(comm, STC)
        one_step(exchange, gradient(comm.rank, 0), cut(MODEL, 1, 1, 1, 1))
        one_step(exchange, gradient(comm.rank, 1), [MODEL])
        return {
            key.split("/")[-1]
            for key, value in exchange.state_dict().items()
            if "server" in key and value.any()
        }

    served = everywhere(2, play)
    assert [sorted(names) for names in served] == [["a.weight"], ["b.weight", "c.weight"]]


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_ranks_serve_nearly_alike(size):
    """No rank has more than the average and one tensor; and the same whatever the order of the tensors."""
    layout = Layout.of((f"t{i}", (i % 13 + 1, 10)) for i in range(200))
    dealt = homes(layout, size)
    loads = [sum(entry.numel for entry in layout if dealt[entry.name] == rank) for rank in range(size)]
    assert max(loads) <= layout.numel / size + 130
    assert homes(Layout(tuple(reversed(layout.entries))), size) == dealt


def test_payload_is_two_bytes_up_for_what_others_serve_and_down_for_the_rest():
    def play(comm):
        comm, x = Metered(comm), gradient(comm.rank, 0)
        parse("server(cast('bf16'), cast('bf16'))").bind(MODEL, comm).reduce(x, MODEL, Turn(0, comm.rank), x)
        return comm.snapshot().payload_sent, comm.snapshot().payload_received

    for rank, (sent, received) in enumerate(everywhere(3, play)):
        own = sum(entry.numel for entry in MODEL if homes(MODEL, 3)[entry.name] == rank)
        assert sent == 2 * MODEL.numel
        assert received == 2 * (2 * own + MODEL.numel - own)


def test_both_roundings_are_independent():
    """natural up and down: unbiased, as it would not be if a rank rounded both ways by the same bits.

    40,000 draws of one value: 5 standard errors of two roundings, each of variance at most 1/8.
    """
    layout = Layout.of([("w", (40_000,))])

    def play(comm):
        out, x = torch.empty(layout.numel), torch.full((layout.numel,), 4 / 3)
        parse("server(natural(), natural())").bind(layout, comm).reduce(x, layout, Turn(0, comm.rank), out)
        return float(out.mean())

    (mean,) = everywhere(1, play)
    assert abs(mean / (4 / 3) - 1) <= 5 * math.sqrt((9 / 8) ** 2 - 1) / math.sqrt(layout.numel)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bucket_that_is_not_finite_is_seen_without_a_feedback(bad):
    def play(comm):
        x = gradient(comm.rank, 0)
        if comm.rank == 2:
            x[5] = bad
        exchange = exchange_on(comm, routes(Route(everything, parse("server(dense(), dense())"))))
        return exchange.mean_(x, MODEL)

    assert everywhere(3, play) == [False] * 3


def test_a_residual_that_overflows_voids_the_step():
    """What a server holds and what comes in are finite each, their sum is not."""
    layout = Layout.of([("w", (10, 10))])

    def play(comm):
        bound, out = parse("server(dense(), sparse(topk(density=0.01)))").bind(layout, comm), torch.empty(100)
        x = torch.full((100,), 3e38)
        first = bound.reduce(x, layout, Turn(0, comm.rank), out)
        second = bound.reduce(x, layout, Turn(1, comm.rank), out)
        return first is not None, second is None, bool(bound.state_dict()["once/server/w"].isfinite().all())

    assert everywhere(2, play) == [(True, True, True)] * 2


@dataclass(frozen=True, repr=False)
class Wild(TensorCodec):
    """Biased, and with an error larger than what it encodes. Its wire cannot be decoded."""

    name = "wild"
    unbiased: ClassVar[bool] = False

    def encode_tensor(self, x, key):
        return x.view(torch.uint8)

    def decode_tensor(self, wire, n):
        raise WireError("too wild")

    def nbytes(self, n):
        return 4 * n

    def omega(self, n):
        return 3.0


def test_a_down_leg_that_would_diverge_is_refused():
    reducer = laconic.reducers.server.Server(parse("dense()"), Wild())
    with pytest.raises(
        SpecError, match=r"a server cannot answer with down=wild\(\): .*omega must be below 1"
    ):
        reducer.bind(MODEL, Loopback.world(1)[0])


def test_a_damaged_message_names_its_sender():
    reducer = laconic.reducers.server.Server(Wild(), parse("dense()"))

    def play(comm):
        x = gradient(comm.rank, 0)
        reducer.bind(MODEL, comm).reduce(x, MODEL, Turn(0, comm.rank), x)

    with pytest.raises(WireError, match="the message that rank 0 sent is damaged: too wild"):
        everywhere(2, play)


@pytest.mark.parametrize(
    "spec", ["server(topk(0.1), dense())", "server(dense(), fp16())", "server(dense(), 3)"]
)
def test_only_codecs_are_taken(spec):
    with pytest.raises(SpecError, match=r"server takes a codec each way, .* got (up|down)="):
        parse(spec)
