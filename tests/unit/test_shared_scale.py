"""SharedScale and the integer sum below it: what is their own, beyond the laws of all reducers."""

from __future__ import annotations

import math
import random

import pytest
import torch
from tests.unit.shared import for_each, refuses

from laconic import kernels
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.errors import SpecError, WireError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.reducers.shared_scale import SharedScale
from laconic.reducers.shared_scale.sum_of_levels import integer_sum, integer_sum_nbytes

LAYOUT = Layout.of([("a", (25, 31)), ("none", (0, 3)), ("b", (7, 11)), ("one", (1,))])
SIZES = (1, 2, 4, 5)
BIGGEST = torch.finfo(torch.float32).max


def x_of(rank):
    x = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(rank)) ** 3
    return x * 2.0**rank  # scales differ by rank


def reduce(spec, x_of, size, *, seed=1, layout=LAYOUT, in_place=False):
    def body(comm):
        x = x_of(comm.rank)
        out = x if in_place else torch.full_like(x, 9.0)
        sent = parse(spec).bind(layout, comm).reduce(x, layout, Turn(3, comm.rank, seed), out)
        return out, sent

    return Loopback.run(size, body)


def plain(xs, keys, levels, clip, block):
    """One tensor, as the paper's steps in plain loops over doubles: its mean."""
    n, size = len(xs[0]), len(xs)
    mean = [0.0] * n
    for first in range(0, n, block or n or 1):
        at = range(first, min(n, first + (block or n)))
        scales = []
        for x in xs:
            largest, middle = max(abs(x[i]) for i in at), sum(x) / n
            sigma = math.sqrt(sum((v - middle) ** 2 for v in x) / n)
            typical = math.sqrt(sum(v * v for v in x) / n)
            scales.append(min(largest, max(clip * sigma, typical)) if clip else largest)
        s = max(scales)
        for x, key in zip(xs, keys, strict=True):
            dither = kernels.dither24(key, n).tolist()
            for i in at if s else ():
                a = levels * min(abs(x[i]) / s, 1.0)
                level = math.floor(a) + (dither[i] < (a - math.floor(a)) * 2**24)
                mean[i] += math.copysign(level, x[i]) * s / levels / size
    return mean


@for_each("size", [1, 2, 5])
@for_each("levels, clip, block", [(1, 2.5, 0), (1, 0, 0), (7, 0, 64), (3, 2.0, 0), (100, 0, 10)])
def test_the_mean_is_that_of_plain_loops(levels, clip, block, size):
    spec = f"shared_scale(levels={levels}, clip={clip}, block={block})"
    xs = [x_of(rank) for rank in range(size)]
    out = reduce(spec, x_of, size)[0][0]
    for entry in LAYOUT:
        where = slice(entry.offset, entry.offset + entry.numel)
        keys = [Turn(3, rank, 1).own(entry.name) for rank in range(size)]
        mean = plain([x[where].tolist() for x in xs], keys, levels, clip, block)
        torch.testing.assert_close(out[where], torch.tensor(mean), rtol=1e-6, atol=1e-6 * 2**size)


def test_a_rank_that_is_alone_shares_its_own_scale() -> None:
    for shared, own in (
        ("", "ternary()"),
        ("clip=0", "ternary(clip=0)"),
        ("levels=7, clip=0, block=64", "qsgd(levels=7, block=64)"),
        ("levels=9, clip=0, block=64, norm='l2'", "qsgd(levels=9, block=64, norm='l2')"),
    ):
        one, other = f"shared_scale({shared})", f"gather({own})"
        assert torch.equal(reduce(one, x_of, 1)[0][0], reduce(other, x_of, 1)[0][0]), shared
        assert parse(one).feedback_codec() == parse(other).feedback_codec()


def test_the_mean_is_a_whole_number_of_steps():
    size, levels = 5, 7
    out = reduce(f"shared_scale(levels={levels}, clip=0)", x_of, size)[0][0][: LAYOUT["a"].numel]
    scale = max(float(x_of(rank)[: LAYOUT["a"].numel].abs().max()) for rank in range(size))
    steps = out.double() * (levels * size / scale)
    assert bool(((steps - steps.round()).abs() < 1e-4).all())
    assert steps.abs().max() <= levels * size


def test_without_clipping_it_is_unbiased():
    """100,000 draws a value: within 5 standard errors, each at most s / (2 levels sqrt(N draws))."""
    size, repeats, steps = 2, 10_000, 10
    layout = Layout.of([("w", (5, repeats))])
    values = [torch.tensor([1.0, -0.3, 0.01, 0.0, 0.25]), torch.tensor([0.2, -0.4, 0.5, 0.0, 0.25])]

    def body(comm):
        bound, total = parse("shared_scale(levels=2, clip=0)").bind(layout, comm), torch.zeros(5)
        x = values[comm.rank].repeat_interleave(repeats)
        for step in range(steps):
            out = torch.empty_like(x)
            bound.reduce(x, layout, Turn(step, comm.rank), out)
            total += out.view(5, repeats).mean(dim=1) / steps
        return total

    error = (Loopback.run(size, body)[0] - (values[0] + values[1]) / 2).abs()
    assert bool((error <= 5 * 0.25 / math.sqrt(size * repeats * steps)).all()) and error[3] == 0


@for_each("size", SIZES)
@for_each("spec", ["shared_scale()", "shared_scale(levels=100, clip=0, block=64)"])
@for_each("value", [0.0, 1.0, -1e-41, 1e-45, BIGGEST, -BIGGEST])
def test_a_constant_gradient_arrives_as_it_is(spec, value, size):
    """Its deviation is 0. Also zeros, the least and the largest numbers, and tensors of one element."""
    for out, sent in reduce(spec, lambda rank: torch.full((LAYOUT.numel,), value), size):
        assert sent is not None
        torch.testing.assert_close(out, torch.full_like(out, value), rtol=1e-6, atol=2e-45)


@for_each("clip", [0.5, 2.5])
@for_each("reducer", ["shared_scale(clip={})", "gather(ternary(clip={}))"])
def test_a_nearly_constant_gradient_is_learned(reducer, clip):
    """Entries of 1 with a deviation of 1e-3 are not cut down to clip * 1e-3."""

    def x_of(rank):
        return 1 + 1e-3 * torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(rank))

    for out, _ in reduce(reducer.format(clip), x_of, 2):
        assert out.mean() == pytest.approx(1, abs=2e-3) and out.min() >= 0.4


@for_each("size", [1, 2, 5])
@for_each("most", [1, 2, 14, 65534])
@for_each("n", [0, 1, 8, 9, 31, 1001])
def test_integers_are_added(n, most, size):
    given = [[random.Random(f"{r} {n}").randint(0, most) for _ in range(n)] for r in range(size)]

    def body(comm):
        codes = torch.tensor(given[comm.rank], dtype=torch.int32)
        sums = integer_sum(kernels.pack_bits(codes, most.bit_length()), n, most, comm)
        return kernels.unpack_bits(sums, (most * size).bit_length(), n).tolist()

    expected = [sum(column) for column in zip(*given, strict=True)]
    assert Loopback.run(size, body) == [expected] * size


@for_each("most", [2, 14, 254])
@for_each("n", [500, 1001, 4096])
def test_the_payload_that_is_told_is_the_most_in_any_group(n, most):
    def body(comm):
        comm = Metered(comm)
        integer_sum(kernels.pack_bits(torch.zeros(n, dtype=torch.int32), most.bit_length()), n, most, comm)
        return comm.snapshot().payload_sent

    handed = [max(Loopback.run(size, body)) for size in range(1, 10)]
    assert max(handed) == integer_sum_nbytes(n, most)


class Damaging(Loopback):
    """Rank 1 sends bits that no level has."""

    def all_to_all(self, chunks):
        if self.rank == 1:
            chunks = [chunk | (torch.arange(chunk.numel()) == 0).byte() * 3 for chunk in chunks]
        return super().all_to_all(chunks)


def test_levels_that_there_are_not_name_their_sender():
    def body(comm):
        x = x_of(comm.rank)
        bound = SharedScale().bind(LAYOUT, Damaging(comm.room, comm.rank))
        bound.reduce(x, LAYOUT, Turn(0, comm.rank), x)

    refuses(WireError, r"the levels that rank 1 sent are damaged: not in 0\.\.2", Loopback.run, 2, body)


def test_wrong_options_are_refused():
    for options, says in (
        ("levels=0", r"levels must be a whole number in 1\.\.32767, got 0"),
        ("levels=32768", "got 32768"),
        ("clip=-1", r"clip must be a number in \[0, 100000\], got -1"),
        ("block=-1, clip=0", "block must be"),
        ("norm='l1', clip=0", "norm must be 'max' or 'l2', got 'l1'"),
        ("block=512", "set clip=0"),
        ("norm='l2'", "set clip=0"),
    ):
        refuses(SpecError, says, parse, f"shared_scale({options})")

    class Crowd(Loopback):
        def __init__(self):
            self.rank, self.size = 0, 20_000

    words = "levels=32767 of 20000 ranks add up to over 2"
    refuses(SpecError, words, SharedScale(levels=32767, clip=0).bind, LAYOUT, Crowd())
    _, sent = reduce("shared_scale()", x_of, 2)[0]
    assert sent.wire.dtype == torch.uint8 and sent.wire.numel() == math.ceil(LAYOUT.numel / 4), "packed"
