"""Sum and Gather: what is their own, beyond the laws of all reducers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tests.unit.shared import for_each, refuses

from laconic import kernels
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.errors import SpecError, WireError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.core.tensor_codec import TensorCodec
from laconic.core.turn import Turn
from laconic.exchange.attached import Attached
from laconic.exchange.method import Route, everything, routes
from laconic.exchange.no_optimiser import MOMENTUM_SGD
from laconic.reducers.gather import Gather
from laconic.reducers.sum import Sum

LAYOUT = Layout.of([("a", (3,)), ("b", (2, 2)), ("c", (5,))])


def reduce(spec, x_of, size=2, layout=LAYOUT, step=0):
    def body(comm):
        out = torch.zeros(LAYOUT.numel)
        return out, spec.bind(layout, comm).reduce(x_of(comm.rank), layout, Turn(step, comm.rank), out)

    return Loopback.run(size, body)


def test_one_range_is_summed_in_its_own_place():
    seen = []

    class Spy(Loopback):
        def all_reduce(self, x, op="sum"):
            seen.append(x.data_ptr())
            return super().all_reduce(x, op)

    comm = Spy(Loopback.world(1)[0].room, 0)
    out = torch.ones(LAYOUT.numel)
    middle = LAYOUT.where(lambda entry: entry.name != "a")
    Sum().bind(LAYOUT, comm).reduce(out, middle, Turn(0), out)
    assert seen == [out[3:].data_ptr()]


@for_each(
    "spec, looks",
    [
        ("sum()", 0),
        ("sum(dtype='fp16')", 0),
        ("sum(dtype='bf16')", 1),
        ("shared_scale()", 0),
        ("gather(cast('bf16'))", 1),
        ("autotune()", 0),
    ],
)
def test_the_exchange_looks_at_a_gradient_once_if_nobody_else_does(spec, looks, monkeypatch):
    """A dense sum costs no pass over memory beforehand."""
    seen, all_finite = [], kernels.all_finite

    def spy(x, segments):
        seen.append(sys._getframe(1).f_globals["__name__"])
        return all_finite(x, segments)

    monkeypatch.setattr(kernels, "all_finite", spy)
    method = routes(Route(everything, parse(spec)))
    (comm,) = Loopback.world(1)
    assert Attached(method, LAYOUT, Metered(comm), MOMENTUM_SGD).mean_(torch.ones(LAYOUT.numel), LAYOUT)
    assert sum(name.startswith("laconic.exchange.") for name in seen) == looks


@for_each("size", [1, 3, 8])
@for_each("dtype, large", [("fp16", 1e6), ("fp16", 3.4e38), ("bf16", 3.4e38)])
def test_sixteen_bits_never_overflow_and_what_was_cut_off_stays_here(dtype, large, size):
    for out, sent in reduce(Sum(dtype=dtype), lambda rank: torch.full((LAYOUT.numel,), large), size):
        assert bool((out > 0.9 * large).all()) and bool(out.isfinite().all())
        left = sent.subtract_from_(torch.full((LAYOUT.numel,), large))
        torch.testing.assert_close(left + out, torch.full_like(out, large), rtol=size * 2.0**-7, atol=0)


@for_each("size", [1, 3, 16])
@for_each("scale", [1e-24, 4e-7, 1.0, 65504.0, 1e30])
def test_fp16_keeps_its_promise_for_every_number_of_ranks(size, scale):
    """2^-11 of a value at each rounding, of which it meets one a rank and one more; or 2^-40 N M."""
    rng = torch.Generator().manual_seed(size)
    spread = torch.logspace(0, -12, LAYOUT.numel)  # also far smaller entries beside the largest
    xs = [scale * spread * torch.randn(LAYOUT.numel, generator=rng) for _ in range(size)]
    largest = max(float(x.abs().max()) for x in xs)
    sizes = torch.stack(xs).double().abs().mean(dim=0)
    limit = (2.0**-11 * (size + 1) * sizes).clamp(min=2.0**-40 * size * largest)
    for out, _ in reduce(Sum(dtype="fp16"), lambda rank: xs[rank].clone(), size):
        assert bool(((out.double() - torch.stack(xs).double().mean(dim=0)).abs() <= limit).all())


def test_a_share_that_the_mean_has_overwritten_says_so():
    (comm,) = Loopback.world(1)
    out = torch.ones(LAYOUT.numel)
    sent = Sum().bind(LAYOUT, comm).reduce(out, LAYOUT, Turn(0), out)
    refuses(ValueError, "reduce into another `out`", sent.add_to_, torch.zeros(LAYOUT.numel))
    assert not sent.clear_(torch.ones(LAYOUT.numel)).any()


@dataclass(frozen=True, repr=False)
class Damaging(TensorCodec):
    """Float32, but the wire of anything that starts with 13 cannot be decoded."""

    name = "damaging"
    unbiased: ClassVar[bool] = True

    def encode_tensor(self, x, key):
        return x.view(torch.uint8)

    def decode_tensor(self, wire, n):
        values = wire.view(torch.float32)
        if values[0] == 13:
            raise WireError("thirteen")
        return values

    def nbytes(self, n):
        return 4 * n

    def omega(self, n):
        return 0.0


def test_a_damaged_message_names_its_sender():
    def x_of(rank):
        return torch.full((LAYOUT.numel,), 13.0 if rank == 2 else 1.0)

    with pytest.raises(WireError, match="the message that rank 2 sent is damaged: thirteen"):
        reduce(Gather(Damaging()), x_of, size=3)


def test_grain_bucket_selects_across_neighbouring_tensors_only():
    x = torch.tensor([9.0, 8.0, 7.0, 0.1, 0.1, 0.1, 0.1, 6.0, 5.0, 0.2, 0.2, 0.2])
    spec = "gather(sparse(topk(density=0.4)), grain='{}')"
    (per_tensor, _), (per_bucket, _) = (
        reduce(parse(spec.format(grain)), lambda rank: x, size=1)[0] for grain in ("tensor", "bucket")
    )
    assert per_tensor.nonzero().flatten().tolist() == [0, 1, 3, 4, 7, 8]
    assert per_bucket.nonzero().flatten().tolist() == [0, 1, 2, 7, 8]
    apart = LAYOUT.where(lambda entry: entry.name != "b")
    out, _ = reduce(parse(spec.format("bucket")), lambda rank: x, size=1, layout=apart)[0]
    assert out.nonzero().flatten().tolist() == [0, 1, 7, 8]


def test_ranks_draw_random_entries_alike_and_anew_each_step():
    spec = parse("gather(sparse(randomk(density=0.3)))")
    shares = []
    for step in range(4):
        sent = [each for _, each in reduce(spec, lambda rank: torch.ones(LAYOUT.numel), size=4, step=step)]
        drawn = [tuple(each.add_to_(torch.zeros(LAYOUT.numel)).nonzero().flatten().tolist()) for each in sent]
        assert len(set(drawn)) == 1 and len(drawn[0]) == 5
        shares.append(drawn[0])
    assert len(set(shares)) > 1


@for_each("dtype", ["fp32", "fp16"])
def test_the_share_of_a_sum_is_kept_whatever_the_memory(dtype):
    """Also of nothing, where all addresses are alike, and of an x that is another view of `out`."""
    layout = Layout.of([("none", (0,))])

    def body(comm):
        bound = Sum(dtype).bind(layout, comm)
        nothing = bound.reduce(torch.empty(0), layout, Turn(0, comm.rank), torch.empty(0))
        out = torch.arange(LAYOUT.numel, dtype=torch.float32) * (1 + comm.rank)
        x = out.clone()
        sent = Sum(dtype).bind(LAYOUT, comm).reduce(out[:], LAYOUT, Turn(0, comm.rank), out)
        return nothing.add_to_(torch.empty(0)).numel(), out, x, sent.add_to_(torch.zeros(LAYOUT.numel))

    for rank, (nothing, out, x, share) in enumerate(Loopback.run(2, body)):
        assert nothing == 0 and torch.equal(share, x)
        assert torch.equal(out, x / (1 + rank) * 1.5)


@for_each("reducer", ["gather({})", "server({}, dense())"])
@for_each("select", ["randomk(density=0.5)", "topk(density=0.5)"])
def test_errors_of_rounding_average_out_over_ranks(reducer, select):
    """Equal gradients on 8 ranks: the mean's variance is 1/8 of one rank's, with 20,000 draws within 10 %.

    Also where ranks draw the same positions: their values are rounded with keys of their own.
    """
    spec = parse(reducer.format(f"sparse({select}, values=natural())"))
    layout = Layout.of([("w", (200, 200))])

    def variance(size):
        def body(comm):
            x, out = torch.full((layout.numel,), 4 / 3), torch.empty(layout.numel)
            spec.bind(layout, comm).reduce(x, layout, Turn(0, comm.rank), out)
            return out[out != 0]

        return float(Loopback.run(size, body)[0].double().var())

    assert variance(8) == pytest.approx(variance(1) / 8, rel=0.1)


def test_a_schedule_is_followed():
    spec = parse("gather(sparse(density_schedule(topk(density=0.01), densities=(1.0, 0.5), every=1)))")
    means = [reduce(spec, lambda rank: torch.ones(LAYOUT.numel), step=step)[0][0] for step in range(3)]
    assert [int((mean != 0).sum()) for mean in means] == [12, 2 + 2 + 3, 3]


def test_wrong_arguments_are_refused():
    refuses(SpecError, "'fp32', 'fp16' or 'bf16', got 'fp8'", Sum, dtype="fp8")
    refuses(SpecError, "'tensor' or 'bucket', got 'row'", Gather, Damaging(), grain="row")
    refuses(SpecError, r"gather takes a codec.*topk\(density=0.1\)", parse, "gather(topk(density=0.1))")
    assert Sum().feedback_codec() is None
    assert Sum(dtype="bf16").feedback_codec() == parse("cast('bf16')")
    assert parse("gather(sparse(topk(density=0.1)))").feedback_codec() == parse("sparse(topk(density=0.1))")
    results = reduce(Sum(), lambda rank: torch.full((LAYOUT.numel,), 3e38))
    assert [sent for _, sent in results] == [None, None], "a sum that overflows is skipped"


def test_messages_are_added_in_rank_order():
    """1 + 1e8 - 1e8 is 0 in float32, and 1 in any order that adds the two large values first."""
    layout = Layout.of([("w", (1,))])
    for codec in ("dense()", "sparse(topk(density=1.0))", "sparse(topk(density=1.0), indices=raw32())"):
        values = (4.0, 4e8, -4e8, 0.0)
        reduced = reduce(
            parse(f"gather({codec})"), lambda r: torch.tensor([values[r]]), size=4, layout=layout
        )
        assert [float(mean[0]) for mean, _ in reduced] == [0.0] * 4, codec
