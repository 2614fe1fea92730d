"""PowerSGD: what Algorithm 1 says, whatever the buckets; directions that die are started anew."""

from __future__ import annotations

import math

import torch
from tests.laws.worlds import MODEL, cut, everywhere, exchange_on, gradient, one_step
from tests.unit.shared import for_each, refuses

from laconic import kernels
from laconic.comm.metered import Metered
from laconic.core.errors import SpecError, StateError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.exchange.method import lift

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


@for_each("size, rank", [(1, 2), (2, 1), (2, 4), (4, 2), (5, 1)])
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


WIDE = Layout.of([("w", (40, 30))])


def low_rank(rank, rows=40, cols=30):
    """Flat, of this rank."""
    rng = torch.Generator().manual_seed(rank)
    return (torch.randn(rows, rank, generator=rng) @ torch.randn(rank, cols, generator=rng)).flatten()


def bound(comm, layout, spec="powersgd(rank=2)"):
    return parse(spec).bind(layout, comm)


def test_a_matrix_of_no_higher_rank_goes_whole_whatever_its_size():
    """From the first step on, also where a rank is left over, and where a direction that died starts anew:
    zero gradients, then of rank 1, then of rank 2."""

    def play(comm):
        for rank, scale in ((0, 1), (1, 1), (2, 1), (2, 1e-30), (2, 1e-12), (2, 1e12), (2, 1e30)):
            reducer, x = bound(comm, WIDE), low_rank(rank) * scale * (1 + comm.rank)
            for t in range(4):
                out = torch.full_like(x, 7.0)
                left = reducer.reduce(x, WIDE, Turn(t, comm.rank), out).subtract_from_(x.clone())
                near = {"rtol": 1e-4, "atol": 1e-5}
                torch.testing.assert_close(out / scale, low_rank(rank) * 1.5, **near, msg=f"{rank}, {scale}")
                assert float(left.abs().max()) <= 1e-4 * scale, (rank, scale)
        reducer = bound(comm, WIDE)
        for t, rank in enumerate((0, 1, 2, 0, 2)):
            x, out = low_rank(rank), torch.empty(WIDE.numel)
            assert reducer.reduce(x, WIDE, Turn(t), out) is not None
            assert float((out - x).norm()) <= 1e-4 * float(x.norm()), (t, rank)

    everywhere(2, play)


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
    steps, apart = 40, 10 * low_rank(1, 20, 16)

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


@for_each("when", [0, 1, 3])
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


@for_each("rank, stop", [(1, 3), (2, 0), (2, 3)])
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


def test_what_does_not_fit_is_refused_and_a_large_rank_sends_all():
    def play(comm):
        state = bound(comm, MODEL).state_dict()
        words = r"once/power/a\.weight has shape \(2, 30\) in the saved state"
        refuses(StateError, words, bound(comm, MODEL, "powersgd(rank=1)").load_state_dict, state)
        refuses(StateError, r"no once/power/a\.weight", bound(comm, MODEL).load_state_dict, {})
        return {key: tuple(value.shape) for key, value in state.items()}

    shapes = {"a": 30, "b": 90, "c": 27}.items()
    assert everywhere(1, play) == [{f"once/power/{name}.weight": (2, n) for name, n in shapes}]
    for rank in ("0", "-1", "2.0", "True", "1025"):
        words = r"powersgd: rank must be a whole number in 1\.\.1024"
        refuses(SpecError, words, parse, f"powersgd(rank={rank})")
    assert parse("powersgd(rank=1024)").nbytes(MODEL) == 4 * MODEL.numel
    kinds = [(route.reducer.name, route.feedback.name) for route in lift("powersgd()").routes]
    assert kinds == [("powersgd", "error_feedback"), ("sum", "no_feedback")]
