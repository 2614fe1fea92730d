"""Majority vote: counted by hand, fair where votes are equal, the same whatever the buckets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.laws.method_ranks import Rank
from tests.laws.worlds import MODEL, gradient
from tests.unit.shared import for_each, same
from torch import Tensor

from laconic import kernels
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.aliases import canonical_names
from laconic.core.errors import WireError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.exchange.method import lift
from laconic.feedback.no_feedback import NoFeedback
from laconic.reducers.majority_vote import tossed
from laconic.reducers.majority_vote.coins import Coins

LAYOUT = Layout.of([("a", (30, 10)), ("b", (3,)), ("none", (0,)), ("c", (17, 9))])


def x_of(rank: int) -> Tensor:
    return torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(rank)) * (1 + rank)


def vote(size: int, given=x_of, layout: Layout = LAYOUT, step: int = 0) -> list[tuple[Tensor, object, int]]:
    """out, sent and bytes handed over, of each rank."""

    def body(loopback: Loopback):
        comm = Metered(loopback)
        out = torch.zeros(LAYOUT.numel)
        reducer = parse("majority_vote()").bind(layout, comm)
        sent = reducer.reduce(given(comm.rank), layout, Turn(step, comm.rank, seed=5), out)
        return out, sent, comm.snapshot().payload_sent

    return Loopback.run(size, body)


@for_each("name, size", [*((kernels.runnable()[-1], size) for size in (1, 2, 3, 4, 8)), ("reference", 5)])
def test_votes_are_counted_one_by_one(name: str, size: int) -> None:
    with kernels.using(name):
        results = vote(size)
    xs = [x_of(rank) for rank in range(size)]
    for entry in LAYOUT:
        ours = [x[entry.offset : entry.offset + entry.numel] for x in xs]
        means = sorted(float(x.double().abs().mean()) for x in ours) if entry.numel else [0.0]
        magnitude = means[(len(means) - 1) // 2]
        words = kernels.philox(Turn(0, seed=5).common(entry.name), (entry.numel + 31) // 32)
        for i in range(entry.numel):
            against = sum(bool(x[i] < 0) for x in ours)
            coin = int(words[i // 32]) >> i % 32 & 1
            negative = coin if 2 * against == size else 2 * against > size
            for out, _, _ in results:
                value = float(out[entry.offset + i])
                assert (value < 0) == bool(negative)
                assert abs(value) == pytest.approx(magnitude, rel=1e-6)


def test_one_bit_an_entry_both_ways_together() -> None:
    """Each tensor's bits fill bytes: ceil(300 / 8) + ceil(3 / 8) + ceil(153 / 8), and 4 bytes each of 4."""
    for size in (1, 2, 5):
        assert [nbytes for _, _, nbytes in vote(size)] == [38 + 1 + 20 + 16] * size
    assert parse("majority_vote()").nbytes(LAYOUT) == 38 + 1 + 20 + 16
    method, largest = lift("majority_vote()"), torch.finfo(torch.float32).max
    assert parse("majority_vote()").feedback_codec() is None
    assert all(isinstance(route.feedback, NoFeedback) for route in method.routes)
    for out, sent, _ in vote(4, lambda rank: torch.full((LAYOUT.numel,), -largest)):
        assert sent is not None and bool((out == -largest).all()), "the largest magnitudes do not overflow"


def test_equal_votes_are_settled_by_fair_coins_that_all_have() -> None:
    """10,000 ties in each of 4 steps: half negative within 5 sigma; odd steps have the opposite coins."""
    layout = Layout.of([("w", (100, 100))])
    drawn = []
    for step in range(4):

        def body(comm: Loopback, step: int = step) -> Tensor:
            out = torch.zeros(10_000)
            x = torch.full((10_000,), 1.0 if comm.rank % 2 else -1.0)
            parse("majority_vote()").bind(layout, comm).reduce(x, layout, Turn(step, comm.rank), out)
            return out

        outs = Loopback.run(4, body)
        assert all(torch.equal(out, outs[0]) for out in outs)
        drawn.append(outs[0] < 0)
        assert abs(int(drawn[-1].sum()) - 5000) < 5 * 50
    assert torch.equal(drawn[0], ~drawn[1]) and torch.equal(drawn[2], ~drawn[3])
    assert abs(int((drawn[0] ^ drawn[2]).sum()) - 5000) < 5 * 50


@for_each("size", [2, 4])
def test_the_result_does_not_depend_on_the_bucket(size: int) -> None:
    """A tensor alone gets what it gets among others: its scale, its votes and its coins are its own."""
    together = vote(size)[0][0]
    for entry in LAYOUT:
        alone = vote(size, layout=LAYOUT.where(lambda other, name=entry.name: other.name == name))[0][0]
        own = slice(entry.offset, entry.offset + entry.numel)
        assert torch.equal(alone[own], together[own])


def test_coins_of_any_range_are_those_of_the_whole() -> None:
    coins = Coins(Turn(3))
    m = 38 + 1 + 20
    whole = tossed(LAYOUT, coins, 0, m)
    assert whole.numel() == m
    for begin in range(m):
        for count in (0, 1, 5, m - begin):
            part = tossed(LAYOUT, coins, begin, min(count, m - begin))
            assert torch.equal(part, whole[begin : begin + count])


def means(size: int, entry_of: Callable[[int], float], steps: int) -> list[Tensor]:
    """The votes of each step on 40,000 entries that are alike on a rank, beside one that is not."""
    layout = Layout.of([("odd", (3,)), ("w", (200, 201))])

    def body(comm: Loopback) -> list[Tensor]:
        bound, outs = parse("majority_vote()").bind(layout, comm), torch.zeros(steps, layout.numel)
        x = torch.full((layout.numel,), entry_of(comm.rank))
        x[-1] = 100.0
        for step in range(steps):
            bound.reduce(x, layout, Turn(step, comm.rank), outs[step])
        return [*outs[:, 3:-1]]

    results = Loopback.run(size, body)
    assert same(results[0], results[-1])
    return results[0]


@for_each("zero", [0.0, -0.0])
@for_each("size", [1, 2, 3, 4])
def test_an_entry_that_is_zero_everywhere_goes_nowhere(size: int, zero: float) -> None:
    """Half up and half down within 5 sigma, back in the next step, and elsewhere in the one after that."""
    outs = means(size, lambda rank: zero, 4)
    scale = float(outs[0].abs().max())
    assert scale > 0
    for out in outs:
        assert abs(float((out / scale).mean())) <= 5 / 200
    assert torch.equal(outs[0], -outs[1]) and torch.equal(outs[2], -outs[3])
    assert abs(float((outs[0] * outs[2] / scale**2).mean())) <= 5 / 200


@for_each("sign", [1.0, -1.0])
def test_who_has_zero_abstains(sign: float) -> None:
    """Two coins beside one vote: it wins unless both are against it.

    P(win) = 3/4; and with one vote each way and one coin, 1/2: 40,000 entries, within 5 sigma.
    """
    (out,) = means(3, lambda rank: sign if rank == 1 else 0.0, 1)
    assert abs(float((out.sign() == sign).float().mean()) - 3 / 4) <= 5 * math.sqrt(3 / 16) / 200
    (out,) = means(3, lambda rank: sign * (rank - 1), 1)
    assert abs(float((out.sign() == sign).float().mean()) - 1 / 2) <= 5 / 2 / 200


@for_each("hostile", [-1e6, 1e6, -1.0, -1e-6, 0.0])
@for_each("size, f", [(3, 1), (4, 1), (8, 3)])
def test_fewer_than_half_of_the_ranks_move_nothing(size: int, f: int, hostile: float) -> None:
    """f < N / 2 hostile ranks send what they like; where the others agree, theirs is the step."""
    honest = x_of(100)
    results = vote(size, lambda rank: honest * (hostile if rank >= size - f else 1.0))
    for out, _, _ in results:
        assert torch.equal(out, results[0][0])
        for entry in LAYOUT:
            own = slice(entry.offset, entry.offset + entry.numel)
            assert torch.equal(out[own].sign(), honest[own].sign())
            assert out[own].abs().tolist() == pytest.approx([float(honest[own].abs().mean())] * entry.numel)


@for_each("size, f", [(3, 1), (4, 1), (7, 3)])
def test_the_scale_is_one_that_an_honest_rank_has(size: int, f: int) -> None:
    """However the honest ranks differ, and wherever the hostile ones pull."""
    for hostile in (0.0, 1e-20, 1e6, 1e30):
        results = vote(size, lambda rank: x_of(rank) * (hostile if rank < f else 1.0))  # noqa: B023
        for entry in LAYOUT:
            own = slice(entry.offset, entry.offset + entry.numel)
            means = [float(x_of(rank)[own].abs().mean()) for rank in range(f, size)] if entry.numel else [0.0]
            largest = float(results[0][0][own].abs().max()) if entry.numel else 0.0
            assert min(means) * (1 - 1e-6) <= largest <= max(means) * (1 + 1e-6)


def test_a_rank_that_votes_too_short_is_named() -> None:
    class Short(Loopback):
        def all_to_all(self, chunks: Sequence[Tensor]) -> list[Tensor]:
            return [chunk[:-1] for chunk in super().all_to_all(chunks)]

    reducer = parse("majority_vote()").bind(LAYOUT, Short(Loopback.world(1)[0].room, 0))
    with pytest.raises(WireError, match="the message that rank 0 sent is damaged: expected 59 bytes, got 58"):
        reducer.reduce(x_of(0), LAYOUT, Turn(0), torch.zeros(LAYOUT.numel))


STEPS, MU, RATE, DECAY = 4, 0.9, 0.01, 0.1


class Honest(Rank):
    """All honest ranks have one gradient; the others, the first `f`, have it `factor` times."""

    def __init__(self, comm: Loopback, f: int = 0, factor: float = 1.0) -> None:
        super().__init__("signum()", comm)
        self.factor = factor if comm.rank < f else 1.0

    def gradient(self, step: int) -> Tensor:
        return gradient(7, step) * self.factor


def trained(size: int, f: int, factor: float) -> list[Tensor]:
    def play(comm: Loopback) -> Tensor:
        rank = Honest(comm, f, factor)
        rank.train(range(STEPS))
        return rank.flat

    return Loopback.run(size, play)


@for_each("factor", [-1e6, 1e6, 0.0])
@for_each("size, f", [(3, 1), (6, 2)])
def test_fewer_than_half_of_the_ranks_change_no_parameter(size: int, f: int, factor: float) -> None:
    alone = trained(1, 0, 1.0)[0]
    for flat in trained(size, f, factor):
        assert torch.equal(flat, alone)


@for_each("nesterov", [False, True])
def test_it_is_its_plain_twin(nesterov: bool) -> None:
    """Three ranks, on every tensor. Tolerance: float32 over four steps."""
    size = 3

    def play(comm: Loopback) -> tuple[Tensor, Tensor]:
        rank = Rank("signum()", comm)
        for group in rank.optimizer.param_groups:
            group |= {"lr": RATE, "momentum": MU, "nesterov": nesterov, "weight_decay": DECAY}
        start = rank.flat
        rank.train(range(STEPS))
        return start, rank.flat

    results = Loopback.run(size, play)
    w = results[0][0].clone()
    velocity = torch.zeros(size, MODEL.numel)
    fading = torch.zeros(MODEL.numel)  # the momentum of the weight decay
    for step in range(STEPS):
        g = torch.stack([gradient(rank, step) for rank in range(size)])
        velocity = MU * (velocity + g) if nesterov else MU * velocity + g
        x = velocity + g if nesterov else velocity
        mean = torch.zeros(MODEL.numel)
        for entry in MODEL:
            own = slice(entry.offset, entry.offset + entry.numel)
            if entry.numel:
                scale = x[:, own].abs().mean(dim=1).median()
                mean[own] = scale * x[:, own].sign().sum(dim=0).sign()
        fading = MU * fading + DECAY * w
        w = w - RATE * (mean + (DECAY * w + MU * fading if nesterov else fading))
    for _, flat in results:
        torch.testing.assert_close(flat, w, rtol=1e-5, atol=1e-6)


def test_the_name_stands_for_itself() -> None:
    assert canonical_names("signum") == ()
    assert repr(parse("signum")) == "signum()"
