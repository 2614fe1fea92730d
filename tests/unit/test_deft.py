"""DEFT against its plain twin; how the budget is shared out, on any layout and over all buckets."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.laws.worlds import MODEL, cut, everywhere, exchange_on, gradient, one_step
from tests.unit.resnet import resnet50
from tests.unit.shared import for_each, refuses
from torch import Tensor

from laconic.codecs.indices.golomb import Golomb
from laconic.comm.loopback import Loopback
from laconic.core.errors import SpecError
from laconic.core.layout import Layout, Segments
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.reducers.deft.bins import Bins, allot
from laconic.reducers.deft.union import message

SIZES = (1, 2, 4, 5, 8)
DENSITY = 0.05
STEPS = 4


def reduced(spec: str, xs: list[Tensor], layout: Layout, step: int = 0) -> list[tuple[Tensor, Tensor] | None]:
    """The mean and the share, dense, on each rank; None where the step is skipped."""

    def play(comm):
        out = torch.full_like(xs[comm.rank], 7.0)
        sent = parse(spec).bind(layout, comm).reduce(xs[comm.rank], layout, Turn(step, comm.rank), out)
        return None if sent is None else (out, sent.add_to_(torch.zeros_like(out)))

    return Loopback.run(len(xs), play)


def pieces_of(layout: Layout, size: int) -> list[slice]:
    found = []
    for entry in layout:
        number = min(entry.numel, size) if entry.numel > layout.numel / size else 1
        for indices in torch.arange(entry.offset, entry.offset + entry.numel).tensor_split(number):
            found.append(slice(int(indices[0]), int(indices[-1]) + 1))
    return found


def shares_of(norms: list[float], sizes: list[int], k: int) -> list[int]:
    return allot(torch.tensor(norms), torch.tensor(sizes, dtype=torch.int64), k).tolist()


def twin(size: int, density: float) -> list[Tensor]:
    """The means of all steps with error feedback, from the definitions, rank by rank and piece by piece."""
    residual, means = [torch.zeros(MODEL.numel) for _ in range(size)], []
    pieces = pieces_of(MODEL, size)
    lengths = [piece.stop - piece.start for piece in pieces]
    order = sorted(range(len(pieces)), key=lambda i: (-lengths[i], i))
    load, home = [0] * size, {}
    for i in order:
        home[i] = load.index(min(load))
        load[home[i]] += lengths[i]
    for step in range(STEPS):
        xs = [residual[rank] + gradient(rank, step) for rank in range(size)]
        norms = [float(xs[(i - step) % size][piece].norm()) for i, piece in enumerate(pieces)]
        ks = shares_of(norms, lengths, round(density * MODEL.numel))
        mask = torch.zeros(MODEL.numel, dtype=torch.bool)
        for i, piece in enumerate(pieces):
            chooser = xs[(home[i] - step) % size][piece].abs()
            mask[piece][chooser.topk(ks[i]).indices] = True
        mean = torch.zeros(MODEL.numel)
        for rank, x in enumerate(xs):
            mean[mask] += x[mask]
            residual[rank] = torch.where(mask, 0.0, x)
        means.append(mean * torch.tensor(1 / size))
    return means


@for_each("density", [DENSITY, 0.4])
@for_each("size", SIZES)
def test_it_is_its_plain_twin(size: int, density: float) -> None:
    """With 0.4 the small tensors are sent in full."""
    layout = MODEL

    def play(comm):
        bound = parse(f"deft(density={density})").bind(layout, comm)
        residual, means = torch.zeros(layout.numel), []
        for step in range(STEPS):
            x, out = residual + gradient(comm.rank, step), torch.empty(layout.numel)
            sent = bound.reduce(x, layout, Turn(step, comm.rank), out)
            residual = sent.subtract_from_(x)
            means.append(out)
        return means

    expected = twin(size, density)
    for means in Loopback.run(size, play):
        for mean, plain in zip(means, expected, strict=True):
            torch.testing.assert_close(mean, plain, rtol=2e-6, atol=1e-6)
            assert torch.equal(mean != 0, plain != 0)


@given(
    st.lists(st.tuples(st.floats(0, 2.0**126, width=32), st.integers(1, 2000)), min_size=1, max_size=40),
    st.floats(1e-4, 1),
)
@settings(max_examples=100, deadline=None)
def test_shares_add_up_to_the_budget(pieces: list[tuple[float, int]], density: float) -> None:
    norms, sizes = [q for q, _ in pieces], [n for _, n in pieces]
    k = max(1, round(density * sum(sizes)))
    shares = shares_of(norms, sizes, k)
    room = sum(n for q, n in pieces if q > 0)
    assert all(0 <= share <= n for share, n in zip(shares, sizes, strict=True))
    assert all(share == 0 for share, q in zip(shares, norms, strict=True) if q == 0)
    assert min(k, room) - 1 <= sum(shares) <= k
    open_ones = [(q, share) for q, share, n in zip(norms, shares, sizes, strict=True) if share < n and q > 0]
    for q, share in open_ones:
        assert all(other <= share + 1 for p, other in open_ones if p <= q), "a larger norm has no less"


def test_shares_are_in_proportion_to_norms() -> None:
    """Where no piece is too small, to one entry: the rest is handed on."""
    norms = [1.5**i for i in range(12)]
    shares = shares_of(norms, [10_000] * 12, 6000)
    assert sum(shares) == 6000
    for share, q in zip(shares, norms, strict=True):
        assert abs(share - 6000 * q / sum(norms)) <= 1


def test_where_there_are_more_pieces_than_entries_the_largest_norms_have_one() -> None:
    assert shares_of([1.0, 3.0, 2.0, 1.0], [9, 9, 9, 9], 2) == [0, 1, 1, 0]
    assert shares_of([0.0, 0.0], [5, 5], 3) == [0, 0]
    assert shares_of([], [], 0) == []


@for_each("size", [1, 2, 16, 64])
def test_bins_are_even_and_hold_every_element_once(size: int) -> None:
    layout = resnet50()
    bins = Bins.of(layout, size)
    assert sorted(bins.parts.joined) == sorted(bins.pieces)
    assert bins.pieces.merged == Segments.whole(layout.numel)
    loads = [part.numel for part in bins.parts.parts]
    assert max(loads) <= 1.05 * layout.numel / size
    assert max(bins.pieces.sizes) <= layout.numel / size or size == 1, "a large layer is cut"


@for_each("size", SIZES)
def test_ranks_choose_apart_and_as_many_as_were_asked_for(size: int) -> None:
    xs = [gradient(rank, 0) for rank in range(size)]
    layout, k = MODEL, round(DENSITY * MODEL.numel)
    bins = Bins.of(layout, size)
    norms = bins.all_norms([bins.norms(xs[rank], rank, 3) for rank in range(size)], 3)
    ks = allot(norms, bins.pieces.sizes_tensor, k)
    chosen: list[int] = []
    for rank in range(size):
        indices, counts = bins.select(xs[rank], ks, rank, 3)
        starts = torch.repeat_interleave(bins.parts[(3 + rank) % size].starts_tensor, counts)
        chosen += (starts + indices).tolist()
    assert len(set(chosen)) == len(chosen) == k
    mean, _ = reduced(f"deft(density={DENSITY})", xs, layout, step=3)[0]
    assert sorted(chosen) == mean.nonzero().flatten().tolist()


@for_each("size", [1, 2, 5, 8])
@for_each(
    "tensors",
    [
        [("one", (5000,))],
        [("one", (1,))],
        [("large", (4000,)), ("a", (3,)), ("b", (1,)), ("none", (0,)), ("c", (7, 2))],
        [(f"t{i}", (2,)) for i in range(3)],
    ],
)
def test_any_layout_works_and_keeps_the_density(size: int, tensors: list[tuple[str, tuple[int]]]) -> None:
    layout = Layout.of(tensors)
    xs = [torch.randn(layout.numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    results = reduced(f"deft(density={DENSITY})", xs, layout)
    asked = max(1, round(DENSITY * layout.numel))
    for mean, share in results:
        assert torch.equal(mean, results[0][0])
        assert int((share != 0).sum()) == asked


@for_each("size", [1, 4])
def test_nothing_to_send_is_harmless(size: int) -> None:
    for mean, share in reduced("deft(density=0.1)", [torch.zeros(MODEL.numel)] * size, MODEL):
        assert not mean.any() and not share.any()


def test_a_layer_that_is_sent_in_full_is_so_also_where_its_owner_has_zeros() -> None:
    layout = Layout.of([("small", (6,)), ("large", (500,))])
    xs = [torch.zeros(506), torch.zeros(506)]
    for rank, x in enumerate(xs):
        x[rank:6:2] = 1e6
        x[6:] = 0.1
    for mean, share in reduced("deft(density=0.1)", xs, layout):
        assert torch.equal(mean[:6], torch.full((6,), 5e5))
        assert int((share != 0).sum()) == 3 + 51 - 6


@for_each("size", [1, 3])
@for_each("name", ["deft", "micro", "exdyna"])
def test_density_1_is_the_plain_mean(name: str, size: int) -> None:
    xs = [gradient(rank, 0) for rank in range(size)]
    spec = f"{name}(density=1.0)"
    assert not parse(spec).needs_feedback
    for mean, _ in reduced(spec, xs, MODEL):
        torch.testing.assert_close(mean, torch.stack(xs).mean(dim=0))


@for_each("name", ["deft", "micro", "exdyna"])
def test_a_sum_that_overflows_voids_the_step_on_all(name: str) -> None:
    xs = [torch.full((MODEL.numel,), 3e38)] * 3
    assert reduced(f"{name}(density=0.1)", xs, MODEL) == [None] * 3


def test_nothing_is_lost_and_a_resumed_run_draws_the_same_bits() -> None:
    def play(comm):
        first, buckets = exchange_on(comm, f"deft(density={DENSITY})"), cut(MODEL, 1, 2, 1)
        means = [one_step(first, gradient(comm.rank, t), buckets)[0] for t in range(3)]
        state = first.state_dict()
        resumed = exchange_on(comm, f"deft(density={DENSITY})")
        resumed.load_state_dict(state, step=3)
        same = [torch.equal(*(one_step(e, gradient(comm.rank, 3), buckets)[0] for e in (first, resumed)))]
        return means, state, same

    results = Loopback.run(4, play)
    given = sum(gradient(r, t).double() for r in range(4) for t in range(3))
    left = 4 * sum(mean.double() for mean in results[0][0])
    for _, state, same in results:
        assert all(same)
        for key, value in state.items():
            if "/residual/" not in key:
                continue
            entry = MODEL[key.rpartition("/")[2]]
            left[entry.offset : entry.offset + entry.numel] += value.flatten()
    assert (given - left).abs().max() <= 1e-5 * given.abs().max()


def test_a_rank_sends_no_more_as_the_group_grows() -> None:
    """Positions K / N, norms L / N: of 64 ranks each sends less than one alone."""
    layout = Layout.of((f"t{i}", (3000 + 500 * i,)) for i in range(20))
    x = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    sent = []
    for size in (1, 16, 64):
        bins = Bins.of(layout, size)
        norms = bins.all_norms([bins.norms(x, rank, 0) for rank in range(size)], 0)
        ks = allot(norms, bins.pieces.sizes_tensor, round(0.01 * layout.numel))
        wires = [
            message(bins.select(x, ks, rank, 0), bins.parts[rank], Golomb(), x.device) for rank in range(size)
        ]
        sent.append(max(wire.numel() for wire in wires))
        total = sum(wire.numel() for wire in wires)
        assert total <= 1.15 * sent[0] + 15 * size, "a head of 8 bytes a rank, and counts"
    assert sent[1] < sent[0] / 8 and sent[2] < sent[0] / 25


@for_each("name", ["deft", "micro", "exdyna"])
@for_each(
    "arguments, says",
    [
        ("density=0", "density must be a number in \\(0, 1\\], got 0"),
        ("density=1.5", "got 1.5"),
        ("indices=qsgd(levels=7)", "indices must be .*such as golomb"),
    ],
)
def test_a_wrong_argument_is_refused(name: str, arguments: str, says: str) -> None:
    refuses(SpecError, says, lambda: parse(f"{name}({arguments})"))


def test_the_budget_is_a_whole_number_of_at_least_one() -> None:
    deft = parse("deft(density=0.001)")
    assert [deft.budget(n) for n in (0, 1, 100, 2600)] == [0, 1, 1, 3]
    assert math.isclose(parse("deft(density=0.37)").budget(1000), 370)


TWO = Layout.of([("loud", (100, 100)), ("quiet", (100, 100))])
SEPARATE = [Layout.of([(entry.name, entry.shape)]) for entry in TWO]
SPEC = "deft(density=0.01)"


def noise(seed: int, n: int = 10_000) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def sent(gradients: list[tuple[float, float]], size: int = 2, bad: int = -1) -> list[list[int]]:
    """How many entries of each layer are sent at each step, of layers with these norms, a bucket each."""

    def play(comm: Loopback) -> list[list[int]]:
        bound, counts = parse(SPEC).bind(TWO, comm), []
        for step, norms in enumerate(gradients):
            found = []
            for bucket, norm in zip(SEPARATE, norms, strict=True):
                x = noise(step) * norm
                void = step == bad and bucket is SEPARATE[1]
                out = torch.zeros(10_000)
                share = bound.reduce(None if void else x, bucket, Turn(step, comm.rank), out)
                found.append(int((out != 0).sum()) if share is not None else -1)
            if step == bad:
                bound.put_back(SEPARATE[0])
            counts.append(found)
        return counts

    results = Loopback.run(size, play)
    assert all(each == results[0] for each in results)
    return results[0]


@for_each("size", [1, 2, 4])
def test_a_loud_layer_gets_its_share_from_another_bucket_too(size: int) -> None:
    """Norms 100 : 1 and 200 entries: 198 and 2 from the second step on; sizes decide in the first."""
    assert sent([(100.0, 1.0)] * 3, size) == [[100, 100], [198, 2], [198, 2]]


def test_shares_follow_the_last_step() -> None:
    """To one entry, as shares are rounded; what a layer of zeros does not use is sent in the step after."""
    counts = sent([(1.0, 1.0), (1.0, 1.0), (3.0, 1.0), (3.0, 1.0), (0.0, 1.0), (0.0, 1.0)])
    expected = [[100, 100], [100, 100], [100, 100], [150, 50], [0, 50], [0, 200]]
    for found, near in zip(counts, expected, strict=True):
        assert all(abs(a - b) <= 1 for a, b in zip(found, near, strict=True)), counts


def test_a_void_step_tells_nothing() -> None:
    counts = sent([(1.0, 1.0), (1000.0, 1.0), (1.0, 1.0)], bad=1)
    assert counts == [[100, 100], [100, -1], [100, 100]]


@for_each("size", [2, 4])
def test_in_many_buckets_as_many_are_sent_as_in_one(size: int) -> None:
    def play(comm: Loopback) -> list[int]:
        exchange, found = exchange_on(comm, "deft(density=0.05)"), []
        for step in range(5):
            buckets = cut(MODEL, 1, 2, 1) if step < 2 else cut(MODEL, 2, 2)
            mean, _ = one_step(exchange, gradient(comm.rank, step), buckets)
            matrices = [e for e in MODEL if len(e.shape) > 1]
            found.append(sum(int((mean[e.offset : e.offset + e.numel] != 0).sum()) for e in matrices))
        return found

    budget = round(0.05 * sum(math.prod(entry.shape) for entry in MODEL if len(entry.shape) > 1))
    for found in everywhere(size, play):
        assert all(abs(each - budget) <= 3 for each in found), "one a bucket, by rounding or as its least"


def test_a_resumed_run_shares_alike() -> None:
    def play(comm: Loopback) -> bool:
        first, buckets = exchange_on(comm, "deft(density=0.05)"), cut(MODEL, 1, 2, 1)
        for step in range(3):
            one_step(first, gradient(comm.rank, step), buckets)
        other = exchange_on(comm, "deft(density=0.05)")
        other.load_state_dict(first.state_dict(), step=3)
        return torch.equal(*(one_step(each, gradient(comm.rank, 3), buckets)[0] for each in (first, other)))

    assert everywhere(2, play) == [True, True]
