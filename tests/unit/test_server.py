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


def loads(layout, size):
    """Elements that each rank serves."""
    shares = [share for served in homes(layout, size).values() for share in served]
    return [sum(share.end - share.begin for share in shares if share.rank == rank) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_ranks_serve_nearly_alike(size):
    """No rank has more than the average and one tensor; and the same whatever the order of the tensors."""
    layout = Layout.of((f"t{i}", (i % 13 + 1, 10)) for i in range(200))
    assert max(loads(layout, size)) <= layout.numel / size + 130
    assert homes(Layout(tuple(reversed(layout.entries))), size) == homes(layout, size)


VGG16 = Layout.of(
    (f"{name}.weight", (rows, columns))
    for name, rows, columns in [
        *(("conv1", 64, 27), ("conv2", 64, 576), ("conv3", 128, 576), ("conv4", 128, 1152)),
        *(("conv5", 256, 1152), ("conv6", 256, 2304), ("conv7", 256, 2304), ("conv8", 512, 2304)),
        *((f"conv{i}", 512, 4608) for i in range(9, 14)),
        *(("fc1", 4096, 25088), ("fc2", 4096, 4096), ("fc3", 1000, 4096)),
    ]
)


@pytest.mark.parametrize("size", [2, 8, 32, 64])
def test_a_layer_that_is_most_of_a_model_is_served_by_all(size):
    """VGG-16, whose fc1 is three quarters of it: in total, and in a bucket of that layer alone."""
    assert max(loads(VGG16, size)) <= 1.01 * VGG16.numel / size
    of_fc1 = [share.end - share.begin for share in homes(VGG16, size)["fc1.weight"]]
    assert len(of_fc1) == size and max(of_fc1) - min(of_fc1) <= 512
    for entry in VGG16:
        shares = homes(VGG16, size)[entry.name]
        assert [share.begin for share in shares] == [0, *(share.end for share in shares[:-1])]
        assert shares[-1].end == entry.numel and all(share.begin % 512 == 0 for share in shares)


LARGE = Layout.of([("a.weight", (300, 301)), ("b.weight", (50, 60)), ("c.weight", (200, 200))])


def on_large(reducer, comm, steps, state=None):
    """The means of some steps, and the state after them."""
    bound, means = parse(reducer).bind(LARGE, comm), []
    if state is not None:
        bound.load_state_dict(state)
    for step in range(steps):
        rng = torch.Generator().manual_seed(100 * step + comm.rank)
        out = torch.empty(LARGE.numel)
        bound.reduce(torch.randn(LARGE.numel, generator=rng), LARGE, Turn(step, comm.rank), out)
        means.append(out)
    return means, bound.state_dict()


@pytest.mark.parametrize("size", [2, 4])
def test_pieces_are_tensors_of_their_own_and_nothing_is_lost(size):
    """Sum of means + what the servers hold = sum of the averages of what came up."""
    spec = "server(dense(), sparse(topk(density=0.01)))"
    ranks = everywhere(size, lambda comm: on_large(spec, comm, 3))
    came = torch.zeros(LARGE.numel)
    for step in range(3):
        for rank in range(size):
            rng = torch.Generator().manual_seed(100 * step + rank)
            came += torch.randn(LARGE.numel, generator=rng) / size
    held = torch.cat(
        [sum(state[f"once/server/{entry.name}"] for _, state in ranks).flatten() for entry in LARGE]
    )
    for means, _ in ranks:
        torch.testing.assert_close(sum(means) + held, came, rtol=0, atol=1e-5)
        assert all(torch.equal(mean, other) for mean, other in zip(means, ranks[0][0], strict=True))
    for entry in LARGE:
        for share in homes(LARGE, size)[entry.name]:
            at = slice(entry.offset + share.begin, entry.offset + share.end)
            assert int(ranks[0][0][0][at].count_nonzero()) == math.ceil(0.01 * (share.end - share.begin))


def test_the_residual_of_pieces_moves_to_another_number_of_ranks():
    spec = "server(dense(), sparse(topk(density=0.01)))"
    before = [state for _, state in everywhere(2, lambda comm: on_large(spec, comm, 3))]
    whole = {key: sum(state[key] for state in before) for key in before[0]}
    after = [state for _, state in everywhere(4, lambda comm: on_large(spec, comm, 0, whole))]
    for key, value in whole.items():
        assert torch.equal(sum(state[key] for state in after), value) and value.any()


def test_payload_is_two_bytes_up_for_what_others_serve_and_down_for_the_rest():
    def play(comm):
        comm, x = Metered(comm), gradient(comm.rank, 0)
        parse("server(cast('bf16'), cast('bf16'))").bind(MODEL, comm).reduce(x, MODEL, Turn(0, comm.rank), x)
        return comm.snapshot().payload_sent, comm.snapshot().payload_received

    for rank, (sent, received) in enumerate(everywhere(3, play)):
        own = loads(MODEL, 3)[rank]
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
