"""Laws of every reducer, on threads as ranks. A new one is tested by being registered with `examples`."""

from __future__ import annotations

from functools import cache

import torch

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.exchange.attached import Attached
from laconic.exchange.method import Route, everything, routes
from laconic.exchange.no_optimiser import MOMENTUM_SGD
from laconic.reducers import Reducer
from tests.cases import over

from .table import specs

SIZES = (1, 2, 4, 5, 8)
HELD = ("once/server", "once/mean")  # kinds of state that hold something of the mean back; others do not
MODEL = Layout.of(
    [("a", (30, 40)), ("b", (40,)), ("gap", (333,)), ("none", (0,)), ("c", (5, 5, 5)), ("d", ())]
)
LAYOUTS = {
    "all": MODEL,
    "with gaps": MODEL.where(lambda entry: entry.name not in ("gap", "d")),
    "one in the middle": MODEL.where(lambda entry: entry.name == "gap"),
    "no element": MODEL.where(lambda entry: entry.name == "none"),
}
GAPS = LAYOUTS["with gaps"]
EXAMPLES = specs(Reducer)
KEEPING = [spec for spec in EXAMPLES if parse(spec).needs_feedback and parse(spec).feedback_codec() is None]
every_reducer = over(spec=EXAMPLES)
every_case = over(spec=EXAMPLES, size=SIZES, layout=LAYOUTS)
# In 16 bits the ring rounds each partial sum: 2^-11 or 2^-8 of it, size times at most. The terms of a
# low-rank product, each rounded, can be larger than their sum; so can be a block's minimum and steps of it.
ROUNDING = {
    "sum(dtype='fp16')": 2.0**-11,
    "sum(dtype='bf16')": 2.0**-8,
    "powersgd()": 2.0**-22,
    "scatter_reduce(minmax(bits=2, block=16), feedback='both')": 2.0**-22,
    "scatter_reduce(minmax(bits=2, block=16), pattern='ring', feedback='both')": 2.0**-22,
    "masked(scatter_reduce(minmax(bits=2, block=16), feedback='both'))": 2.0**-22,
}
DENSE = (
    "sum()",
    "gather(dense())",
    "gather(sparse(topk(density=1.0)))",
    "scatter_reduce(dense())",
    "two_level(sum(), sum(), ranks_per_node=1)",
    "oktopk(density=1.0)",
    "gtopk(density=1.0)",
)


def x_of(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(MODEL.numel, generator=generator) ** 3


def play(spec, size, layout, *, alpha=1.0, bad=(), in_place=False):
    """Return out, sent, x, the meter and the memory of each rank; `out` starts at 7 everywhere."""
    reducer = parse(spec)

    def body(comm):
        comm = Metered(comm)
        bound = reducer.bind(layout, comm)
        x = None if comm.rank in bad else x_of(comm.rank)
        out = torch.full((MODEL.numel,), 7.0)
        if in_place:
            x, out = x, out if x is None else x
        sent = bound.reduce(x, layout, Turn(3, comm.rank, seed=1), out, alpha)
        return out, sent, x, comm.snapshot(), kept(bound.state_dict())

    return Loopback.run(size, body)


@cache
def played(spec, size, layout):
    """Play with alpha = 3, once for all laws that only read the results."""
    return play(spec, size, layout, alpha=3.0)


def kept(state):
    """Return what a reducer's memory holds back of the mean, flat in the model's order."""
    flat = torch.zeros(MODEL.numel)
    for key, value in state.items():
        kind, _, name = key.rpartition("/")
        if kind in HELD:
            at = MODEL[name].offset
            flat[at : at + value.numel()] += value.flatten()
    return flat


def outside(layout: Layout) -> torch.Tensor:
    mask = torch.ones(MODEL.numel, dtype=torch.bool)
    for view in layout.segments.views(mask):
        view.fill_(False)
    return mask


def test_the_table_is_not_empty():
    assert {parse(spec).name for spec in EXAMPLES} >= {"sum", "gather", "dense_first"}


@every_case
def test_replicas_are_bit_identical_and_nothing_else_changes(spec, size, layout):
    results = played(spec, size, layout)
    for rank, (out, sent, x, _, _) in enumerate(results):
        assert sent is not None
        assert torch.equal(out, results[0][0])
        assert torch.equal(out[outside(layout)], torch.full_like(out, 7.0)[outside(layout)])
        assert torch.equal(x, x_of(rank))


@every_case
def test_the_mean_and_the_memory_of_it_are_the_average_of_the_sent_shares(spec, size, layout):
    """A reducer that compresses the mean itself without a memory declares that this does not hold."""
    results = played(spec, size, layout)
    total, scale = torch.zeros(MODEL.numel), torch.zeros(MODEL.numel)
    for _, sent, x, _, memory in results:
        share = sent.add_to_(torch.zeros(MODEL.numel))
        total += (share / size - memory) * 3.0
        scale += ((share.abs() + x.abs()) / size + memory.abs()) * 3.0
    inside = ~outside(layout)
    loose = ROUNDING.get(spec, 2.0**-24) * size
    exact = bool(((results[0][0] - total).abs() <= loose * scale + 1e-6)[inside].all())
    assert exact or not parse(spec).exact_mean
    assert torch.equal(total[~inside], torch.zeros_like(total)[~inside])


@every_reducer
def test_both_laws_hold_over_several_steps(spec):
    """Three ranks, with error feedback where the reducer needs it."""
    layout, reducer, size, steps = GAPS, parse(spec), 3, 5

    def body(comm):
        bound, left, means = reducer.bind(layout, comm), torch.zeros(MODEL.numel), []
        given, shares = torch.zeros(MODEL.numel), torch.zeros(MODEL.numel)
        for step in range(steps):
            x, out = x_of(comm.rank, step) + left, torch.zeros(MODEL.numel)
            sent = bound.reduce(x, layout, Turn(step, comm.rank, seed=1), out)
            means.append(out)
            shares = sent.add_to_(shares)
            given += x.abs()
            if reducer.needs_feedback:
                left = sent.subtract_from_(x.clone())
                left[outside(layout)] = 0.0
        return torch.stack(means), shares / size - kept(bound.state_dict()), given + shares.abs()

    results = Loopback.run(size, body)
    means = results[0][0]
    assert all(torch.equal(each, means) for each, _, _ in results)
    assert bool(means.isfinite().all())
    total, scale = (sum(result[i] for result in results) for i in (1, 2))
    loose = ROUNDING.get(spec, 2.0**-24) * size
    exact = bool(((means.sum(0) - total).abs() <= loose * scale + 1e-5).all())
    assert exact or not reducer.exact_mean


@every_reducer
def test_nothing_is_held_back_after_a_discard(spec):
    def body(comm):
        bound, out = parse(spec).bind(GAPS, Metered(comm)), torch.zeros(MODEL.numel)
        bound.reduce(x_of(comm.rank), GAPS, Turn(3, comm.rank, seed=1), out)
        before = kept(bound.state_dict())
        bound.discard()
        return bound.holds_back, bool(before.any()), bool(kept(bound.state_dict()).any())

    results = Loopback.run(3, body)
    assert not any(after for _, _, after in results)
    assert any(before for _, before, _ in results) <= any(holds for holds, _, _ in results)


@over(spec=EXAMPLES, size=SIZES[:-1], layout=LAYOUTS)
def test_the_sent_share_leaves_the_memory(spec, size, layout):
    for _, sent, x, _, _ in played(spec, size, layout):
        share = sent.add_to_(torch.zeros_like(x))
        torch.testing.assert_close(sent.subtract_from_(x.clone()), x - share, rtol=0, atol=1e-6)
        cleared = sent.clear_(x.clone())
        assert bool((cleared[share != 0] == 0).all())
        assert torch.equal(cleared[outside(layout)], x[outside(layout)])


@over(spec=DENSE, size=SIZES, layout=LAYOUTS)
def test_a_dense_codec_gives_the_plain_mean(spec, size, layout):
    plain = sum(x_of(rank) for rank in range(size)) / size
    inside = ~outside(layout)
    for out, *_ in play(spec, size, layout):
        torch.testing.assert_close(out[inside], plain[inside], rtol=1e-6, atol=1e-6)


@over(spec=EXAMPLES, size=SIZES[:-1])
def test_x_may_be_out(spec, size):
    apart, together = play(spec, size, GAPS), play(spec, size, GAPS, in_place=True)
    inside = ~outside(GAPS)
    for rank, (one, other) in enumerate(zip(apart, together, strict=True)):
        assert torch.equal(one[0][inside], other[0][inside])
        assert torch.equal(other[0][~inside], x_of(rank)[~inside])


@over(spec=EXAMPLES, layout=LAYOUTS, bad=((1, {0}), (2, {1}), (4, {0, 2}), (5, {0, 1, 2, 3, 4})))
def test_one_rank_that_is_not_finite_skips_the_step_everywhere(spec, layout, bad):
    size, ranks = bad
    assert [sent for _, sent, *_ in play(spec, size, layout, bad=ranks)] == [None] * size


@over(spec=EXAMPLES, size=SIZES)
def test_the_payload_is_at_most_nbytes(spec, size):
    for _, _, _, meter, _ in play(spec, size, GAPS):
        assert 0 < meter.payload_sent <= parse(spec).nbytes(GAPS) or parse(spec).name == "dense_first"


@over(spec=EXAMPLES, bad=(torch.nan, torch.inf, -torch.inf))
def test_a_gradient_that_no_feedback_has_checked_skips_the_step_everywhere(spec, bad):
    """Without a memory `x` is the bucket itself: the exchange or the reducer looks at it."""

    def body(comm):
        bucket = x_of(comm.rank)
        if comm.rank == 1:
            bucket[33] = bad
        exchange = Attached(routes(Route(everything, parse(spec))), MODEL, Metered(comm), MOMENTUM_SGD)
        return exchange.mean_(bucket, MODEL), bool(bucket.isnan().all())

    assert Loopback.run(3, body) == [(False, True)] * 3


@over(spec=KEEPING, size=SIZES, layout=LAYOUTS)
def test_the_residual_is_no_larger_than_the_input(spec, size, layout):
    """`needs_feedback` promises it where there is no codec with an omega of its own."""
    for _, sent, x, _, _ in played(spec, size, layout):
        left, inside = sent.subtract_from_(x.clone()), ~outside(layout)
        assert float(left[inside].norm()) <= float(x[inside].norm()) * (1 + 1e-6)
