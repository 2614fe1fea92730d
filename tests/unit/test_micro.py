"""MiCRO and ExDyna: the plain twin, the pace of the threshold, parts that move, state."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.shared import for_each, refuses
from torch import Tensor

from laconic.codecs.indices.delta import Delta
from laconic.codecs.indices.golomb import Golomb
from laconic.codecs.indices.raw32 import Raw32
from laconic.comm.loopback import Loopback
from laconic.core.errors import SpecError, StateError, WireError
from laconic.core.layout import Layout, Segments
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.reducers.deft.borders import Borders
from laconic.reducers.deft.exdyna import Exdyna
from laconic.reducers.deft.threshold_controlled import BLOCKS, CONTROLLER, quota
from laconic.reducers.deft.threshold_controller import ThresholdController, histogram, quantile
from laconic.reducers.deft.union import message, read

from ..laws.worlds import MODEL, cut, exchange_on, gradient, one_step

DENSITY = 0.05
NAMES = ("micro", "exdyna")


def owners(cuts: tuple[int, ...], blocks: int, step: int) -> torch.Tensor:
    """The rank that chooses each element of the model."""
    size, found = len(cuts) - 1, []
    for entry in MODEL:
        position = torch.arange(entry.numel)
        borders = torch.tensor([entry.numel * border // blocks for border in cuts[1:-1]], dtype=torch.int64)
        found.append((torch.bucketize(position, borders, right=True) - step) % size)
    return torch.cat(found)


@for_each("name", NAMES)
@for_each("size", [1, 2, 5])
def test_it_is_its_plain_twin_bit_for_bit(name, size):
    """With error feedback, from the second step on; threshold and borders as the state tells them."""

    def play(comm):
        bound = parse(f"{name}(density={DENSITY})").bind(MODEL, comm)
        residual, log = torch.zeros(MODEL.numel), []
        for step in range(6):
            state = bound.state_dict()
            x, out = residual + gradient(comm.rank, step), torch.empty(MODEL.numel)
            sent = bound.reduce(x, MODEL, Turn(step, comm.rank), out)
            residual = sent.subtract_from_(x.clone())
            log.append((state, x, out, residual))
        return log

    logs = Loopback.run(size, play)
    for step in range(1, 6):
        state = logs[0][step][0]
        for log in logs:
            assert all(torch.equal(value, state[key]) for key, value in log[step][0].items())
        cuts, blocks = Borders.even(size, size).cuts, size
        if name == "exdyna":
            cuts, blocks = Borders.even(size, 1024).of(state[BLOCKS]).cuts, 1024
        xs = torch.stack([log[step][1] for log in logs])
        own = xs[owners(cuts, blocks, step), torch.arange(MODEL.numel)]
        chosen = own.abs() >= state[CONTROLLER][0].float()
        total = torch.zeros(MODEL.numel)
        for x in xs:
            total = total + x
        plain = torch.where(chosen, total * torch.tensor(1 / size), 0.0)
        assert 0 < int(chosen.sum()) < MODEL.numel // 4
        for log in logs:
            assert torch.equal(log[step][2], plain)
            assert torch.equal(log[step][3], torch.where(chosen, 0.0, log[step][1]))


@for_each("name", NAMES)
def test_the_first_step_sends_the_largest_of_each_tensor(name):
    size, layout = 4, Layout.of([("a", (40, 50)), ("b", (3000,)), ("c", (7,))])
    xs = [torch.randn(layout.numel, generator=torch.Generator().manual_seed(r)) for r in range(size)]

    def play(comm):
        out = torch.zeros(layout.numel)
        parse(f"{name}(density=0.01)").bind(layout, comm).reduce(
            xs[comm.rank], layout, Turn(0, comm.rank), out
        )
        return out

    mean = Loopback.run(size, play)[0]
    for entry, few in zip(layout, (20, 30, 0), strict=True):
        found = int((mean[entry.offset : entry.offset + entry.numel] != 0).sum())
        assert few <= found <= few + 1
    home = slice(0, 500) if name == "micro" else slice(0, 2000 * 256 // 1024)  # rank 0's part of a
    chosen = mean[home].nonzero().flatten()
    assert sorted(chosen.tolist()) == sorted(xs[0][home].abs().topk(len(chosen)).indices.tolist())


@given(
    st.floats(1e-4, 0.999), st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(0, 2**64 - 1)
)
@settings(max_examples=60, deadline=None)
def test_quotas_of_the_parts_add_up_to_that_of_the_tensor(density, sizes, key):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    quotas = [quota(density, start, size, key) for start, size in zip(starts, sizes, strict=True)]
    assert all(0 <= k <= size for k, size in zip(quotas, sizes, strict=True))
    assert math.floor(density * sum(sizes)) <= sum(quotas) <= math.ceil(density * sum(sizes))


@for_each("scale", [1e-30, 1.0, 1e30])
def test_a_quantile_is_that_of_the_sorted_sizes(scale):
    """To 3 % of the size: an eighth of an octave is 9 %, and is interpolated."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, generator=rng) ** 3 * scale
    segments = Segments((0, 12_000), (9_000, 8_000))
    inside = torch.cat(segments.views(x)).abs().sort(descending=True).values
    counts = histogram(x, segments)
    assert int(counts.sum()) == 17_000
    for k in (100, 1_000, 5_000):
        assert abs(quantile(counts, k) / float(inside[k - 1]) - 1) < 0.03
    assert quantile(histogram(torch.zeros(9), Segments.whole(9)), 3) == 0
    assert quantile(histogram(torch.tensor([4.0, 0.0, -2.0]), Segments.whole(3)), 5) == 2


def test_a_pace_settles_where_the_density_is_right():
    """A threshold d is reached by 1 / d^4 entries of 10,000. Whatever it starts from."""
    for start in (0.15, 1.0):
        pace = ThresholdController(threshold=start, growth=0.75, steps=2)
        sent = []
        for _ in range(80):
            sent.append(min(10_000, round(pace.threshold**-4)))
            pace = pace.after(sent[-1], asked=100)
            if not pace.threshold:
                pace = ThresholdController(0.3, pace.growth, 2)  # as made anew
        assert all(90 <= each <= 110 for each in sent[40:])
        assert abs(sum(sent[40:]) / 40 - 100) <= 4


def test_a_pace_tells_other_data_from_few_entries():
    steady = ThresholdController(1.0, 0.0, 50)
    assert steady.after(900, asked=100).threshold == 0
    assert steady.after(8, asked=0.5).threshold > 1, "of so few, eight more are no sign"
    assert steady.after(100, asked=100) == ThresholdController(1.0, 0.0, 51)
    assert 0.9 < steady.after(0, asked=100).threshold < 1
    assert ThresholdController.of(steady.state) == steady


@for_each("name", NAMES)
def test_a_gradient_that_grows_at_once_is_sent_once_and_then_as_asked(name):
    size = 2

    def play(comm):
        exchange, found = exchange_on(comm, f"{name}(density={DENSITY})"), []
        for step in range(16):
            mean, _ = one_step(exchange, gradient(comm.rank, step) * (1000 if step >= 10 else 1), [MODEL])
            matrices = [mean[e.offset : e.offset + e.numel] for e in MODEL if len(e.shape) > 1]
            found.append(sum(int((part != 0).sum()) for part in matrices) / sum(map(len, matrices)))
        return found

    found = Loopback.run(size, play)[0]
    assert found[10] > 8 * DENSITY
    assert found[11] <= 1.1 * DENSITY
    assert 0.6 * DENSITY < sum(found[12:]) / 4 < 1.4 * DENSITY


@for_each("name", NAMES)
def test_zeros_send_nothing_and_leave_the_threshold_to_be_made(name):
    def play(comm):
        bound = parse(f"{name}(density={DENSITY})").bind(MODEL, comm)
        for step in range(5):
            x = torch.zeros(MODEL.numel) if step < 3 else gradient(comm.rank, step)
            out = torch.ones(MODEL.numel)
            bound.reduce(x, MODEL, Turn(step, comm.rank), out)
            threshold = float(bound.state_dict()[CONTROLLER][0])
            assert (bool(out.any()), threshold > 0) == (step >= 3, step >= 3), step

    Loopback.run(3, play)


@for_each("name", NAMES)
@for_each("when", [0, 1, 3])
def test_a_void_step_leaves_no_trace(name, when):
    """Inf on rank 1 in the last bucket: threshold and borders are as if the step had not been."""

    def play(comm):
        exchange, buckets = exchange_on(comm, f"{name}(density={DENSITY})"), cut(MODEL, 1, 1, 2)
        states = []
        for step in range(5):
            flat = gradient(comm.rank, step)
            if step == when and comm.rank == 1:
                flat[3] = torch.inf
            _, valid = one_step(exchange, flat, buckets)
            assert valid == (step != when)
            state = exchange.state_dict()
            states.append(torch.cat([value.flatten() for key, value in state.items() if "/once/" in key]))
        return states

    for states in Loopback.run(2, play):
        before = states[when - 1] if when else None
        assert before is None or torch.equal(states[when], before)
        assert when or not states[0][0], "no threshold was made"
        assert all(not torch.equal(states[i], states[i - 1]) for i in range(1, 5) if i != when)


@given(st.integers(1, 40), st.lists(st.integers(0, 1000), min_size=40, max_size=40), st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_borders_stay_in_order_whatever_was_found(size, counts, steps):
    borders = Borders.even(size, 1024)
    least = max(1, 1024 // (4 * size))
    for _ in range(steps):
        borders = borders.moved(counts[:size])
        lengths = [b - a for a, b in zip(borders.cuts, borders.cuts[1:], strict=False)]
        assert borders.cuts[0] == 0 and borders.cuts[-1] == 1024 and min(lengths) >= least
    assert Borders.even(size, 1024).of(borders.state) == borders
    layout = Layout.of([("a", (1,)), ("b", (3, 5)), ("none", (0,)), ("c", (4000,))])
    assert sorted(p for p in borders.parts(layout).joined if p[1]) == sorted(
        p for part in borders.parts(layout).parts for p in part if p[1]
    )
    assert borders.parts(layout).joined.merged == Segments.whole(layout.numel)


def test_parts_move_until_all_find_as_much():
    """Entries of the first quarter of each tensor are larger: of four parts, one has most to find."""
    layout, size = Layout.of([("a", (8192,)), ("b", (64, 128))]), 4
    weight = torch.cat([torch.where(torch.arange(8192) < 2048, 1.4, 1.0)] * 2)

    def play(comm, name):
        bound = parse(f"{name}(density=0.05)").bind(layout, comm)
        residual, shares = torch.zeros(layout.numel), []
        for step in range(130):
            seed = torch.Generator().manual_seed(100 * step + comm.rank)
            x = residual + weight * torch.randn(layout.numel, generator=seed)
            out = torch.empty(layout.numel)
            sent = bound.reduce(x, layout, Turn(step, comm.rank), out)
            residual = sent.subtract_from_(x)
            counts = sent.counts.view(size, 2).sum(dim=1)
            shares.append(float(counts.max() / counts.float().mean()))
        return sum(shares[-20:]) / 20

    fixed, moving = (Loopback.run(size, lambda comm, n=name: play(comm, n))[0] for name in NAMES)
    assert fixed > 1.4
    assert moving < 1.3


@for_each("name", NAMES)
def test_state_of_another_number_of_ranks_keeps_the_threshold(name):
    """Borders begin anew, where they are of other parts."""

    def run(comm):
        bound = parse(f"{name}(density={DENSITY})").bind(MODEL, comm)
        for step in range(4):
            bound.reduce(gradient(comm.rank, step), MODEL, Turn(step, comm.rank), torch.zeros(MODEL.numel))
        return bound.state_dict()

    state = Loopback.run(4, run)[0]

    def take(comm):
        bound = parse(f"{name}(density={DENSITY})").bind(MODEL, comm)
        bound.load_state_dict(state)
        return bound.state_dict()

    for taken in Loopback.run(3, take):
        assert torch.equal(taken[CONTROLLER], state[CONTROLLER])
        if name == "exdyna":
            assert torch.equal(taken[BLOCKS], Borders.even(3, 1024).state)


def test_a_state_of_another_method_and_a_group_of_too_many_ranks_are_refused():
    class Many(Loopback):
        def __init__(self):
            self.rank, self.size = 0, 1025

    bound = parse("micro()").bind(MODEL, Loopback.world(1)[0])
    state = {"residual/a.weight": torch.zeros(3)}
    refuses(StateError, "of another method", bound.load_state_dict, state)
    words = "at most 1024 ranks, one per block, got 1025: use micro"
    refuses(SpecError, words, Exdyna().bind, MODEL, Many())


class Tampered(Loopback):
    """A rank that gets the messages of rank 1, in its n-th gathering, with a byte changed or cut off."""

    def __init__(self, comm: Loopback, nth: int, cut: bool) -> None:
        super().__init__(comm.room, comm.rank)
        self.left, self.cut = nth, cut

    def all_gather(self, x: Tensor) -> list[Tensor]:
        came = super().all_gather(x)
        self.left -= 1
        if self.left == 0:
            came[1] = came[1][:-1] if self.cut else came[1] ^ 255
        return came


def test_a_damaged_message_is_refused_with_the_rank_that_sent_it() -> None:
    norms = ("deft", 1, True, "the message that rank 1 sent is damaged: expected 2 norms")
    cases = [
        (name, nth, short, "the message that rank 1 sent is damaged")
        for name, nth in (("deft", 2), ("micro", 1), ("exdyna", 1))
        for short in (False, True)
    ]
    for name, nth, short, words in (norms, *cases):

        def play(comm, name=name, nth=nth, short=short, words=words):
            bound = parse(f"{name}(density=0.1)").bind(MODEL, Tampered(comm, nth, short))
            turn, out = Turn(0, comm.rank), torch.zeros(MODEL.numel)
            refuses(WireError, words, bound.reduce, gradient(comm.rank, 0), MODEL, turn, out)

        Loopback.run(3, play)


@for_each("coding", [Golomb(), Raw32(), Delta()])
def test_any_bytes_are_positions_in_their_segments_or_refused(coding) -> None:
    segments = Segments((3, 50, 60), (40, 0, 300))
    rng = torch.Generator().manual_seed(0)
    indices = torch.tensor([0, 39, 7, 8, 299], dtype=torch.int32)
    counts = torch.tensor([2, 0, 3])
    wire = message((indices, counts), segments, coding, indices.device)
    back = read(wire, segments, coding)
    assert torch.equal(back[0], indices) and torch.equal(back[1], counts)
    refused = 0
    for _ in range(600):
        bad = wire.clone()
        at = torch.randint(bad.numel(), (2,), generator=rng)
        bad[at] = torch.randint(256, (2,), generator=rng, dtype=torch.uint8)
        bad = bad[: int(torch.randint(1, bad.numel() + 1, (1,), generator=rng))]
        try:
            found, of_each = read(bad, segments, coding)
        except WireError:
            refused += 1
            continue
        assert found.numel() == int(of_each.sum()) and int(of_each.min()) >= 0
        sizes = torch.repeat_interleave(segments.sizes_tensor, of_each)
        assert bool(((found >= 0) & (found < sizes)).all())
    assert refused > 300
