"""Ok-Topk: the bits of global top-k, at a cost that does not grow with the ranks; and what keeps it so."""

from __future__ import annotations

import pytest
import torch
from benchmarks.gradient import stored
from benchmarks.scaling.rank import Messages
from tests.laws.worlds import everywhere, exchange_on, one_step
from tests.unit.shared import for_each, refuses

from laconic.comm.metered import Metered
from laconic.core.errors import SpecError
from laconic.core.layout import Layout, Segments
from laconic.core.selector import kept
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.reducers.oktopk import MOST_GROWTH
from laconic.reducers.oktopk.regions import Regions

MODEL = Layout.of([("a", (90, 200)), ("b", (40, 30)), ("c", (3, 3)), ("d", (50, 300))])
DENSITY = 0.02
K = sum(kept(DENSITY, entry.numel) for entry in MODEL)


def given(rank, step, layout=MODEL):
    """Gradients as ranks have them: a part that all share, some rows large, and noise of their own."""
    shared, own = (torch.Generator().manual_seed(seed) for seed in (step, 1000 * (step + 1) + rank))
    rows = torch.rand(layout.numel // 50 + 1, generator=torch.Generator().manual_seed(7)) ** 3
    scale = rows.repeat_interleave(50)[: layout.numel]
    common = torch.randn(layout.numel, generator=shared)
    return scale * (common + torch.randn(layout.numel, generator=own))


def nothing(bound, step):
    pass


def every_threshold_too_high(bound, step):
    bound._floors = dict.fromkeys(MODEL.names, 1e30)


def every_threshold_too_low(bound, step):
    bound._floors = dict.fromkeys(MODEL.names, 0.0)


def regions_cut(bound, inner):
    key, (layout, when, regions) = next(iter(bound._regions.items()))
    cuts = (0, *inner(len(regions.cuts) - 1), MODEL.numel)
    bound._regions[key] = layout, when, Regions(regions.tensors, cuts)


def one_region_has_nearly_all(bound, step):
    regions_cut(bound, lambda size: range(1, size))


def regions_without_an_element(bound, step):
    regions_cut(bound, lambda size: [MODEL["d"].offset] * (size - 1))


def reductions(size, spoil, steps=5, spec=f"oktopk(density={DENSITY}, every=2)"):
    """Whether oktopk and gtopk agree in each step, the most all_gathers of one; `spoil` comes between."""

    def play(comm):
        metered = Metered(comm)
        fast = parse(spec).bind(MODEL, metered)
        plain = parse(f"gtopk(density={DENSITY})").bind(MODEL, comm)
        same, gathers = [], []
        for step in range(steps):
            x, turn = given(comm.rank, step), Turn(step, comm.rank)
            one, other = torch.empty(MODEL.numel), torch.empty(MODEL.numel)
            metered.reset()
            sent = fast.reduce(x, MODEL, turn, one, alpha=3.0)
            gathers.append(metered.snapshot().parts[("", "all_gather")].calls)
            expected = plain.reduce(x, MODEL, turn, other, alpha=3.0)
            zeros = torch.zeros(MODEL.numel)
            shares = sent.add_to_(zeros.clone()), expected.add_to_(zeros.clone())
            same.append(torch.equal(one, other) and torch.equal(*shares))
            spoil(fast, step)
        return same, max(gathers)

    return everywhere(size, play)


@for_each("size", [1, 2, 5, 8])
def test_it_gives_the_bits_of_global_top_k(size):
    for same, rounds in reductions(size, nothing):
        assert same == [True] * 5 and rounds <= 2


@for_each(
    "spoil, rounds",
    [
        (every_threshold_too_high, 2),
        (every_threshold_too_low, 1),
        (one_region_has_nearly_all, 1),
        (regions_without_an_element, 1),
    ],
)
@for_each("size", [5])
def test_neither_thresholds_nor_regions_change_a_bit(spoil, rounds, size):
    assert reductions(size, spoil, spec=f"oktopk(density={DENSITY})") == [([True] * 5, rounds)] * size


def test_what_a_region_had_to_hold_back_comes_in_a_second_round():
    """The first rank of five chooses on its own what is large in the sum: far more than the average there."""
    layout = Layout.of([("w", (1000,))])

    def play(comm):
        metered, results = Metered(comm), []
        fast = parse("oktopk(density=0.05)").bind(layout, metered)
        plain = parse("gtopk(density=0.05)").bind(layout, comm)
        for step in range(2):
            x = torch.zeros(1000)
            x[200 * comm.rank : 200 * comm.rank + 50] = 1.0
            if step == 1 and comm.rank == 0:
                x *= 100.0  # regions are those of step 0: one has all of the mean
            one, other = torch.empty(1000), torch.empty(1000)
            metered.reset()
            fast.reduce(x, layout, Turn(step, comm.rank), one)
            gathers = metered.snapshot().parts[("", "all_gather")].calls
            plain.reduce(x, layout, Turn(step, comm.rank), other)
            results.append((torch.equal(one, other), gathers, int((one != 0).sum())))
        return results

    for (same, _, changed), second in everywhere(5, play):
        assert same and changed == 50
        assert second == (True, 2, 50)


LARGE = Layout.of([("a", (720, 200)), ("b", (320, 30)), ("c", (3, 3)), ("d", (400, 300))])


def traffic(size, first, steps, density, feedback):
    """Bytes of messages that a rank sends and receives a step, the most of any; of `steps`, after `first`."""
    spec = f"oktopk(density={density})"

    def play(comm):
        meter, out = Metered(comm, link=Messages()), torch.empty(LARGE.numel)
        exchange, bound = exchange_on(meter, spec, layout=LARGE), parse(spec).bind(LARGE, meter)
        for step in range(first + steps):
            if step == first:
                meter.reset()
            if feedback:
                one_step(exchange, given(comm.rank, step, LARGE), [LARGE])
            else:
                bound.reduce(given(comm.rank, step, LARGE), LARGE, Turn(step, comm.rank), out)
        told = meter.snapshot()
        return told.network_sent / steps, told.network_received / steps

    each = everywhere(size, play)
    k = sum(kept(density, entry.numel) for entry in LARGE)
    assert max(received for _, received in each) <= 6 * 4 * k, "the paper's bound: 6 k numbers"
    return max(sent + received for sent, received in each)


def test_traffic_does_not_grow_with_the_ranks():
    """The (N-1)/N of an all-reduce, 1.31, and little more, for 400 entries a region; `gather` grows 21.

    Once residuals have filled up, the (N-1)/N of an all-reduce, 1.25, times 1.07 in the same way."""
    assert traffic(64, 1, 1, 0.1, feedback=False) <= 1.4 * traffic(4, 1, 1, 0.1, feedback=False)
    assert traffic(16, 8, 4, DENSITY, feedback=True) <= 1.33 * traffic(4, 8, 4, DENSITY, feedback=True)


def test_a_threshold_bounds_what_comes_and_saves_bytes_when_it_is_used_again():
    """Of the sums of eight ranks, little more than k come instead of nearly 2 k.

    Before there is a threshold, at most twice k, and 4 of each of the 11 pieces: of ranks with little in
    common, who choose over 5 k."""

    def first(comm):
        metered, out = Metered(comm), torch.empty(MODEL.numel)
        x = torch.randn(MODEL.numel, generator=torch.Generator().manual_seed(comm.rank))
        parse(f"oktopk(density={DENSITY})").bind(MODEL, metered).reduce(x, MODEL, Turn(0, comm.rank), out)
        return metered.snapshot().parts[("", "all_gather")].payload_sent

    def play(comm):
        came = {}
        for spoil in (nothing, every_threshold_too_low):
            metered = Metered(comm)
            bound, out = parse(f"oktopk(density={DENSITY})").bind(MODEL, metered), torch.empty(MODEL.numel)
            for step in range(4):
                metered.reset()
                bound.reduce(given(comm.rank, step), MODEL, Turn(step, comm.rank), out)
                spoil(bound, step)
            came[spoil] = metered.snapshot().parts[("", "all_gather")].payload_received
        return came[nothing] / came[every_threshold_too_low]

    assert sum(everywhere(8, first)) <= 6 * (2 * K + 4 * 11)
    assert max(everywhere(8, play)) <= 0.8


def test_every_step_of_a_real_gradient_keeps_the_density():
    """The stored gradient with noise of every rank, error feedback, 24 steps: ceil(density * n) a tensor."""
    parts = stored()
    layout = Layout.of((name, tuple(part.shape)) for name, part in parts.items())
    flat = torch.cat([part.flatten() for part in parts.values()])
    density, matrices = 0.01, [entry for entry in layout if len(entry.shape) > 1]

    def play(comm):
        exchange, changed = exchange_on(comm, f"oktopk(density={density})", layout=layout), []
        for step in range(24):
            generator = torch.Generator().manual_seed(100 * step + comm.rank)
            bucket = flat * (1 + 2 * torch.randn(flat.numel(), generator=generator))
            exchange.begin()
            exchange.mean_(bucket, layout)
            exchange.end()
            views = dict(zip(layout.names, layout.segments.views(bucket), strict=True))
            changed.append([int((views[entry.name] != 0).sum()) for entry in matrices])
        return changed

    wanted = [kept(density, entry.numel) for entry in matrices]
    assert everywhere(4, play) == [[wanted] * 24] * 4


def test_more_ranks_than_elements_and_a_wrong_period():
    layout = Layout.of([("w", (3,)), ("none", (0,)), ("v", ())])

    def play(comm):
        bound, out = parse("oktopk(density=0.5)").bind(layout, comm), torch.empty(4)
        x = torch.tensor([1.0, -3.0, 2.0, 5.0])
        sent = [bound.reduce(x, layout, Turn(step, comm.rank), out) for step in range(3)]
        return out.tolist(), sent[-1].clear_(x.clone()).tolist()

    assert everywhere(8, play) == [([0.0, -3.0, 2.0, 5.0], [1.0, 0.0, 0.0, 0.0])] * 8
    for every in (0, 2.5, True):
        refuses(SpecError, "oktopk: every must be a whole number", parse, f"oktopk(every={every!r})")


@for_each("size", [1, 2, 5])
def test_a_tensor_without_elements_changes_nothing(size):
    """Nor does it spoil a threshold, or what thresholds have grown by."""
    layout = Layout.of([("a", (60, 50)), ("none", (0,)), ("b", (40, 30))])

    def play(comm):
        fast = parse("oktopk(density=0.02)").bind(layout, comm)
        plain = parse("gtopk(density=0.02)").bind(layout, comm)
        same = []
        for step in range(6):
            x = given(comm.rank, step)[: layout.numel]
            one, other = torch.empty(layout.numel), torch.empty(layout.numel)
            fast.reduce(x, layout, Turn(step, comm.rank), one)
            plain.reduce(x, layout, Turn(step, comm.rank), other)
            same.append(torch.equal(one, other) and 1 <= fast._growth <= MOST_GROWTH)
        return same

    assert everywhere(size, play) == [[True] * 6] * size


def test_thresholds_grow_like_the_smallest_entries_of_the_mean():
    layout = Layout.of([("a", (60, 50))])

    def play(comm):
        bound, out = parse("oktopk(density=0.02)").bind(layout, comm), torch.empty(layout.numel)
        x, found = given(comm.rank, 0)[: layout.numel], []
        for step in range(5):
            bound.reduce(x * 1.1**step, layout, Turn(step, comm.rank), out)
            found.append(bound._growth)
        return found[1:]

    assert everywhere(2, play) == [[pytest.approx(1.1, rel=1e-4)] * 4] * 2


def test_no_rank_sends_more_than_nbytes_says():
    """Its own choice is in others' regions, all of the mean in its own: two rounds, of k entries together."""
    layout, spec, k = Layout.of([("w", (64_000,))]), parse("oktopk(density=0.01)"), 640

    def play(comm):
        metered, random = Metered(comm), torch.Generator().manual_seed(comm.rank)
        bound, out = spec.bind(layout, metered), torch.empty(layout.numel)
        x = torch.zeros(layout.numel)
        x[comm.rank :: 100] = 1 + torch.rand(k, generator=random)
        bound.reduce(x, layout, Turn(0, comm.rank), out)  # the regions are of 8,000 elements
        metered.reset()
        x = torch.zeros(layout.numel)
        elsewhere = 8000 + torch.randperm(56_000, generator=random)
        if comm.rank:
            first = torch.randperm(8000, generator=torch.Generator().manual_seed(9))
            x[first[310 * comm.rank :][:310]] = 100 + torch.rand(310, generator=random)
            x[elsewhere[:330]] = 1.0
        else:
            x[elsewhere[:k]] = 5.0
        bound.reduce(x, layout, Turn(1, comm.rank), out)
        told = metered.snapshot()
        return told.payload_sent, told.parts[("", "all_gather")].calls

    for sent, rounds in everywhere(8, play):
        assert rounds == 2 and sent <= spec.nbytes(layout)


def test_regions_are_cut_when_asked_and_for_new_buckets():
    def play(comm):
        metered = Metered(comm)
        bound = parse(f"oktopk(density={DENSITY}, every=3)").bind(MODEL, metered)
        other = Layout.of((entry.name, entry.shape) for entry in reversed(MODEL.entries))
        cut = []
        for step, layout in enumerate([MODEL] * 5 + [other] * 4):
            metered.reset()
            bound.reduce(given(comm.rank, step), layout, Turn(step, comm.rank), torch.empty(MODEL.numel))
            cut.append(("", "all_reduce") in metered.snapshot().parts)
        bound.load_state_dict(bound.state_dict())
        metered.reset()
        bound.reduce(given(comm.rank, 9), other, Turn(9, comm.rank), torch.empty(MODEL.numel))
        return cut, ("", "all_reduce") in metered.snapshot().parts

    expected = [True, False, False, True, False, True, False, False, True]
    assert everywhere(2, play) == [(expected, True)] * 2


@for_each("size", [1, 3, 64])
def test_regions_share_what_was_chosen(size):
    """All positions once, in pieces that cross no tensor; of equal choices, equal parts but for one entry."""
    tensors = Segments.consecutive([700, 0, 20, 300])
    chosen = torch.randperm(1020, generator=torch.Generator().manual_seed(0))[:256].sort().values
    regions = everywhere(size, lambda comm: Regions.agreed(chosen, tensors, comm, torch.device("cpu")))
    assert all(each == regions[0] for each in regions)
    pieces = [piece for each in regions[0].pieces for piece in each.sizes]
    assert len(regions[0].pieces) == size and sum(pieces) == 1020 and min(pieces) > 0
    sizes = torch.zeros(4, dtype=torch.int64).index_add_(0, regions[0].tensor_of, torch.tensor(pieces))
    assert sizes.tolist() == [700, 0, 20, 300]
    parts = regions[0].split(chosen, chosen.to(torch.float32))
    held = [part.indices.numel() for part in parts]
    assert max(held) - min(held) <= 1
    positions, counts, values = regions[0].join(parts)
    assert torch.equal(positions, chosen) and torch.equal(values, chosen.to(torch.float32))
    assert regions[0].per_tensor(counts).sum() == 256


def test_nothing_chosen_anywhere_is_cut_evenly():
    tensors, nothing = Segments.consecutive([10]), torch.empty(0, dtype=torch.int64)
    regions = everywhere(4, lambda comm: Regions.agreed(nothing, tensors, comm, torch.device("cpu")))
    assert [each.cuts for each in regions] == [(0, 2, 5, 7, 10)] * 4
