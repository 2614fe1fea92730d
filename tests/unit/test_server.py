"""Server: both directions compressed, nothing lost, and no rank through which all goes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from tests.laws.worlds import MODEL, cut, everywhere, exchange_on, gradient, one_step
from tests.unit.shared import for_each, refuses, same

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.errors import SpecError, WireError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.core.tensor_codec import TensorCodec
from laconic.core.turn import Turn
from laconic.reducers.server import Server
from laconic.reducers.server.deal import homes

STC = "server(sparse(topk(density=0.1)), sparse(topk(density=0.05)))"
SPECS = (
    STC,
    "server(cast('bf16'), cast('bf16'))",
    "server(sparse(topk(density=0.05), indices=golomb()), dense())",
    "server(sparse(randomk(density=0.1)), sparse(topk(density=0.05)))",
)
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


@for_each("spec", SPECS)
@for_each("size", [1, 2, 5])
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


@for_each("size", [1, 2, 7, 64])
def test_ranks_serve_nearly_alike(size):
    """No rank has more than the average and one tensor; and the same whatever the order of the tensors.

    Of VGG-16, whose fc1 is three quarters of it: in total, and in a bucket of that layer alone.
    """
    layout = Layout.of((f"t{i}", (i % 13 + 1, 10)) for i in range(200))
    assert max(loads(layout, size)) <= layout.numel / size + 130
    assert homes(Layout(tuple(reversed(layout.entries))), size) == homes(layout, size)
    assert max(loads(VGG16, size)) <= 1.01 * VGG16.numel / size
    of_fc1 = [share.end - share.begin for share in homes(VGG16, size)["fc1.weight"]]
    assert len(of_fc1) == size and max(of_fc1) - min(of_fc1) <= 512
    for entry in VGG16:
        shares = homes(VGG16, size)[entry.name]
        assert [share.begin for share in shares] == [0, *(share.end for share in shares[:-1])]
        assert shares[-1].end == entry.numel and all(share.begin % 512 == 0 for share in shares)


VGG16 = Layout.of(
    (f"{name}.weight", (rows, columns))
    for name, rows, columns in [
        *(("conv1", 64, 27), ("conv2", 64, 576), ("conv3", 128, 576), ("conv4", 128, 1152)),
        *(("conv5", 256, 1152), ("conv6", 256, 2304), ("conv7", 256, 2304), ("conv8", 512, 2304)),
        *((f"conv{i}", 512, 4608) for i in range(9, 14)),
        *(("fc1", 4096, 25088), ("fc2", 4096, 4096), ("fc3", 1000, 4096)),
    ]
)


LARGE = Layout.of([("a.weight", (300, 301)), ("b.weight", (50, 60)), ("c.weight", (200, 200))])


def large(step, rank):
    return torch.randn(LARGE.numel, generator=torch.Generator().manual_seed(100 * step + rank))


def on_large(reducer, comm, steps, state=None):
    """The means of some steps, and the state after them."""
    bound, means = parse(reducer).bind(LARGE, comm), []
    if state is not None:
        bound.load_state_dict(state)
    for step in range(steps):
        out = torch.empty(LARGE.numel)
        bound.reduce(large(step, comm.rank), LARGE, Turn(step, comm.rank), out)
        means.append(out)
    return means, bound.state_dict()


@for_each("size", [2, 4])
def test_pieces_are_tensors_of_their_own_and_nothing_is_lost(size):
    """Sum of means + what the servers hold = sum of the averages of what came up; also among other ranks."""
    spec = "server(dense(), sparse(topk(density=0.01)))"
    ranks = everywhere(size, lambda comm: on_large(spec, comm, 3))
    came = sum(large(step, rank) / size for step in range(3) for rank in range(size))
    whole = {key: sum(state[key] for _, state in ranks) for key in ranks[0][1]}
    held = torch.cat([whole[f"once/server/{entry.name}"].flatten() for entry in LARGE])
    for means, _ in ranks:
        torch.testing.assert_close(sum(means) + held, came, rtol=0, atol=1e-5)
        assert same(means, ranks[0][0])
    for entry in LARGE:
        for share in homes(LARGE, size)[entry.name]:
            at = slice(entry.offset + share.begin, entry.offset + share.end)
            assert int(ranks[0][0][0][at].count_nonzero()) == math.ceil(0.01 * (share.end - share.begin))
    after = everywhere(6 - size, lambda comm: on_large(spec, comm, 0, whole))
    for key, value in whole.items():
        assert torch.equal(sum(state[key] for _, state in after), value) and value.any()


def test_payload_is_two_bytes_up_for_what_others_serve_and_down_for_the_rest():
    def play(comm):
        comm, x = Metered(comm), gradient(comm.rank, 0)
        parse("server(cast('bf16'), cast('bf16'))").bind(MODEL, comm).reduce(x, MODEL, Turn(0, comm.rank), x)
        return comm.snapshot().payload_sent, comm.snapshot().payload_received

    for rank, (sent, received) in enumerate(everywhere(3, play)):
        own = loads(MODEL, 3)[rank]
        assert sent == 2 * MODEL.numel
        assert received == 2 * (2 * own + MODEL.numel - own)


def test_both_roundings_are_independent() -> None:
    """natural up and down: unbiased, as it would not be if a rank rounded both ways by the same bits.

    40,000 draws of one value: 5 standard errors of two roundings, each of variance at most 1/8.
    """
    layout = Layout.of([("w", (40_000,))])
    bound = parse("server(natural(), natural())").bind(layout, Loopback.world(1)[0])
    out = torch.empty(layout.numel)
    bound.reduce(torch.full((layout.numel,), 4 / 3), layout, Turn(0), out)
    limit = 5 * math.sqrt((9 / 8) ** 2 - 1) / math.sqrt(layout.numel)
    assert abs(float(out.mean()) / (4 / 3) - 1) <= limit


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


def test_what_does_not_fit_is_refused():
    reducer = Server(parse("dense()"), Wild())
    words = r"server does not support down=wild\(\): .*omega must be below 1"
    refuses(SpecError, words, reducer.bind, MODEL, Loopback.world(1)[0])
    for spec in ("server(topk(0.1), dense())", "server(dense(), fp16())", "server(dense(), 3)"):
        refuses(SpecError, r"server needs a codec for each direction, .* got (up|down)=", parse, spec)


def test_a_damaged_message_names_its_sender():
    reducer = Server(Wild(), parse("dense()"))

    def play(comm):
        x = gradient(comm.rank, 0)
        reducer.bind(MODEL, comm).reduce(x, MODEL, Turn(0, comm.rank), x)

    refuses(WireError, "the message that rank 0 sent is damaged: too wild", everywhere, 2, play)
