"""PowerSGD: what Algorithm 1 says, whatever the buckets; directions that die are started anew."""

from __future__ import annotations

import math

import pytest
import torch
from tests.laws.worlds import MODEL, cut, everywhere, exchange_on, gradient, one_step

from laconic import kernels
from laconic.comm.metered import Metered
from laconic.core.errors import SpecError, StateError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.exchange.method import Route, everything, lift, routes

STEPS = 6
MATRICES = [entry for entry in MODEL if len(entry.shape) > 1]


def twin(size, rank, steps=STEPS):
    """Algorithms 1 and 2 in plain words and float64, on all gradients at once: the mean of every step.

    The start is drawn as the reducer draws it: the rest is the paper's, with one memory for the mean.
    """
    means, memory = [], {entry.name: torch.zeros(entry.numel).double() for entry in MATRICES}
    right = {}
    for t in range(steps):
        mean = torch.zeros(MODEL.numel)
        for entry in MATRICES:
            where = slice(entry.offset, entry.offset + entry.numel)
            x = memory[entry.name] + sum(gradient(i, t)[where].double() for i in range(size)) / size
            matrix = x.view(entry.shape[0], -1)
            m, n = matrix.shape
            if (m + n) * rank >= m * n:
                mean[where] = x.float()
                continue
            if entry.name not in right:
                drawn = kernels.uniform(Turn(t).common(entry.name), rank * n)
                right[entry.name] = (2 * drawn - 1).view(rank, n).T.double()
            left = torch.linalg.qr(matrix @ right[entry.name])[0]
            right[entry.name] = matrix.T @ left
            low = left @ right[entry.name].T
            memory[entry.name] = (matrix - low).flatten()
            mean[where] = low.flatten().float()
        means.append(mean)
    return means


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_it_does_what_the_paper_says(size, rank):
    """To float32's rounding, which six steps of subspace iteration with close singular values magnify."""

    def play(comm):
        exchange, buckets = exchange_on(comm, f"powersgd(rank={rank})"), cut(MODEL, 1, 2, 1)
        return [one_step(exchange, gradient(comm.rank, t), buckets)[0] for t in range(STEPS)]

    for means in everywhere(size, play):
        for t, (mean, expected) in enumerate(zip(means, twin(size, rank), strict=True)):
            for entry in MATRICES:
                where = slice(entry.offset, entry.offset + entry.numel)
                off = (mean[where] - expected[where]).norm() / expected[where].norm()
                assert float(off) <= 1e-4, (t, entry.name)


@pytest.mark.parametrize("size", [1, 3])
def test_bits_do_not_depend_on_how_buckets_are_cut(size):
    def play(comm):
        cuts = ([MODEL], cut(MODEL, 1, 1, 1, 1), cut(MODEL, 3, 1))
        worlds = [exchange_on(comm, "powersgd(rank=2)") for _ in cuts]
        return [
            [one_step(world, gradient(comm.rank, t), buckets)[0] for t in range(STEPS)]
            for world, buckets in zip(worlds, cuts, strict=True)
        ]

    for whole, *others in everywhere(size, play):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))


def low_rank(rank, rows=40, cols=30):
    rng = torch.Generator().manual_seed(rank)
    return torch.randn(rows, rank, generator=rng) @ torch.randn(rank, cols, generator=rng)


def bound(comm, layout, spec="powersgd(rank=2)"):
    return parse(spec).bind(layout, comm)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_matrix_of_no_higher_rank_goes_whole_from_the_first_step(rank):
    """And with a rank left over nothing is NaN."""
    layout = Layout.of([("w", (40, 30))])

    def play(comm):
        reducer, x, outs = bound(comm, layout), low_rank(rank).flatten(), []
        for t in range(3):
            out = torch.full_like(x, 7.0)
            sent = reducer.reduce(x * (1 + comm.rank), layout, Turn(t, comm.rank), out)
            outs.append((out, sent.subtract_from_(x * (1 + comm.rank))))
        return outs

    for outs in everywhere(2, play):
        for out, left in outs:
            torch.testing.assert_close(out, low_rank(rank).flatten() * 1.5, rtol=1e-4, atol=1e-5)
            assert float(left.abs().max()) <= 1e-4


def test_a_direction_that_died_is_started_anew():
    """Zero gradients, then of rank 1, then of rank 2: each is found at once, and no column stays zero."""
    layout = Layout.of([("w", (40, 30))])

    def play(comm):
        reducer, off = bound(comm, layout), []
        for t, rank in enumerate((0, 1, 2, 0, 2)):
            x = low_rank(rank).flatten()
            out = torch.empty_like(x)
            assert reducer.reduce(x, layout, Turn(t), out) is not None
            off.append(float((out - x).norm()) <= 1e-4 * float(x.norm()))
        return off

    assert everywhere(1, play) == [[True] * 5]


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_gradients_of_any_size_are_sent(scale):
    layout = Layout.of([("w", (40, 30))])

    def play(comm):
        reducer, x = bound(comm, layout), low_rank(2).flatten() * scale
        out = torch.empty_like(x)
        for t in range(4):
            assert reducer.reduce(x, layout, Turn(t, comm.rank), out) is not None
        return out / scale

    for out in everywhere(2, play):
        torch.testing.assert_close(out, low_rank(2).flatten(), rtol=1e-4, atol=1e-5)


def test_the_warm_start_turns_to_the_best_rank_2():
    """20 steps on one gradient end within 1 % of the best error of rank 2, which the first is far from."""
    layout = Layout.of([("w", (60, 50))])
    rng = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(60, 50, generator=rng), full_matrices=False)
    spectrum = 0.8 ** torch.arange(50.0)
    x = (u * spectrum @ v).flatten()
    best = float(spectrum[2:].norm())

    def play(comm):
        reducer, out, off = bound(comm, layout), torch.empty_like(x), []
        for t in range(20):
            reducer.reduce(x, layout, Turn(t), out)
            off.append(float((x - out).norm()))
        return off

    (off,) = everywhere(1, play)
    assert off[0] > 1.1 * best
    assert best * (1 - 1e-5) <= off[-1] <= 1.01 * best


def test_a_memory_stays_bounded_where_ranks_always_differ():
    """Gradients of opposite sign on two ranks, and noise: what the paper subtracts adds up for ever."""
    layout = Layout.of([("w", (20, 16))])
    steps, apart = 40, 10 * low_rank(1, 20, 16).flatten()

    def given(rank, t):
        noise = torch.randn(layout.numel, generator=torch.Generator().manual_seed(2 * t + rank))
        return noise + apart * (1 - 2 * rank)

    def play(comm):
        exchange = exchange_on(comm, "powersgd(rank=1)", layout=layout)
        papers, own = torch.zeros(layout.numel), 0.0
        for t in range(steps):
            mean, _ = one_step(exchange, given(comm.rank, t), [layout])
            papers += given(comm.rank, t) - mean
            own = float(exchange.state_dict()["route0/residual/w"].norm())
        return own, papers, exchange.state_dict()["route0/residual/w"].flatten()

    (own, papers, mine), (_, other_papers, other) = everywhere(2, play)
    torch.testing.assert_close((mine + other) / 2, (papers + other_papers) / 2, rtol=1e-3, atol=1e-2)
    assert own < 0.5 * float(papers.norm())


def test_small_tensors_are_summed_and_the_payload_is_told():
    """(m + n) r against m n: (5, 3) and (4, 4) at rank 2 go as they are; so does what is no matrix."""
    shapes = {"w": (40, 30), "small": (5, 3), "even": (4, 4), "b": (9,), "conv": (8, 4, 3, 3)}
    layout = Layout.of(shapes.items())
    reducer = parse("powersgd(rank=2)")
    assert reducer.nbytes(layout) == 4 * (2 * 70 + 15 + 16 + 9 + 2 * 44)

    def play(comm):
        comm, x = Metered(comm), torch.arange(float(layout.numel)) * (1 + comm.rank)
        out = torch.empty_like(x)
        sent = reducer.bind(layout, comm).reduce(x, layout, Turn(0, comm.rank), out)
        left = sent.subtract_from_(x.clone())
        return out, left, comm.snapshot()

    for out, left, meter in everywhere(2, play):
        for name in ("small", "even", "b"):
            where = slice(layout[name].offset, layout[name].offset + layout[name].numel)
            assert torch.equal(out[where], 1.5 * torch.arange(float(layout.numel))[where])
            assert not left[where].any()
        assert meter.payload_sent == reducer.nbytes(layout) and meter.calls == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bucket_that_is_not_finite_is_seen_without_a_feedback(bad):
    def play(comm):
        x = gradient(comm.rank, 0)
        if comm.rank == 2:
            x[5] = bad
        exchange = exchange_on(comm, routes(Route(everything, parse("powersgd(rank=2)"))))
        return exchange.mean_(x, MODEL)

    assert everywhere(3, play) == [False] * 3


@pytest.mark.parametrize("when", [0, 1, 3])
def test_a_void_step_leaves_the_state_as_it_was(when):
    """Inf on rank 1 in the last bucket, when others have been reduced; also while buckets are regrouped."""
    inf_at = MODEL["a.weight"].offset + 77

    def play(comm):
        exchange = exchange_on(comm, "powersgd(rank=2)")
        for t in range(5):
            flat = gradient(comm.rank, t)
            before = exchange.state_dict()
            if t == when and comm.rank == 1:
                flat[inf_at] = math.inf
            _, valid = one_step(exchange, flat, cut(MODEL, 1, 2, 1) if t < 1 else cut(MODEL, 2, 1, 1))
            assert valid == (t != when)
            after = exchange.state_dict()
            assert all(bool(value.isfinite().all()) for value in after.values())
            same = [torch.equal(value, after[key]) for key, value in before.items() if "power" in key]
            assert all(same) == (t == when)
        return {key: value for key, value in exchange.state_dict().items() if "power" in key}

    first, *others = everywhere(3, play)
    assert any(value.any() for value in first.values())
    for other in others:
        assert all(torch.equal(value, other[key]) for key, value in first.items()), "equal on all ranks"


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("stop", [0, 3])
def test_a_resumed_run_ends_with_the_same_bits(rank, stop):
    spec = f"powersgd(rank={rank})"

    def play(comm):
        unbroken, before = exchange_on(comm, spec), exchange_on(comm, spec)
        expected = [one_step(unbroken, gradient(comm.rank, t), [MODEL])[0] for t in range(STEPS)]
        for t in range(stop):
            one_step(before, gradient(comm.rank, t), cut(MODEL, 2, 2))
        after = exchange_on(comm, spec)
        after.load_state_dict(before.state_dict(), step=stop)
        got = [one_step(after, gradient(comm.rank, t), cut(MODEL, 1, 3))[0] for t in range(stop, STEPS)]
        return [torch.equal(a, b) for a, b in zip(expected[stop:], got, strict=True)]

    assert everywhere(3, play) == [[True] * (STEPS - stop)] * 3


def test_a_state_of_another_rank_or_model_is_refused():
    def play(comm):
        state = bound(comm, MODEL).state_dict()
        with pytest.raises(StateError, match=r"once/power/a\.weight has shape \(2, 30\) in the saved state"):
            bound(comm, MODEL, "powersgd(rank=1)").load_state_dict(state)
        with pytest.raises(StateError, match=r"no once/power/a\.weight"):
            bound(comm, MODEL).load_state_dict({})
        return {key: tuple(value.shape) for key, value in state.items()}

    shapes = {"a": 30, "b": 90, "c": 27}.items()
    assert everywhere(1, play) == [{f"once/power/{name}.weight": (2, n) for name, n in shapes}]


def test_a_rank_that_is_none_is_refused_and_a_large_one_sends_all():
    for rank in ("0", "-1", "2.0", "True", "1025"):
        with pytest.raises(SpecError, match=r"powersgd: rank must be a whole number in 1\.\.1024"):
            parse(f"powersgd(rank={rank})")
    assert parse("powersgd(rank=1024)").nbytes(MODEL) == 4 * MODEL.numel


def test_as_a_method_it_is_error_fed():
    routes = lift("powersgd()").routes
    assert [(route.reducer.name, route.feedback.name) for route in routes] == [
        ("powersgd", "error_feedback"),
        ("sum", "no_feedback"),
    ]
