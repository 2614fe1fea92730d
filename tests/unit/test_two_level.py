"""Two levels: dense inside a machine, compressed between leaders; nothing is lost on the way."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from tests.laws.worlds import MODEL, cut, everywhere, exchange_on, gradient, one_step
from tests.unit.memory_world import STEPS, lost, reloaded, resumed, states
from tests.unit.shared import for_each, refuses

import laconic
from laconic.comm.loopback import Loopback
from laconic.comm.mesh import machines
from laconic.comm.metered import Metered
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.reducers.two_level import TwoLevel

TOPK = "gather(sparse(topk(density=0.1)))"
SERVER = "server(sparse(topk(density=0.1)), sparse(topk(density=0.05)))"
MESHES = [(1, 1), (2, 2), (4, 1), (4, 2), (6, 2), (6, 3), (8, 4)]
MATRICES = [entry for entry in MODEL if len(entry.shape) > 1]
every_mesh = for_each("size, local", MESHES)


def spec_of(local, outer=TOPK, inner="sum()"):
    return f"two_level({inner}, {outer}, ranks_per_node={local})"


def twin(size, local, steps=STEPS):
    """Plain words: each machine has one memory, to which its mean is added; its top-k goes to the others."""
    groups, means = size // local, []
    codec = parse("sparse(topk(density=0.1))")
    left = {(g, entry.name): torch.zeros(entry.numel) for g in range(groups) for entry in MATRICES}
    for t in range(steps):
        mean = torch.zeros(MODEL.numel)
        for entry in MATRICES:
            where = slice(entry.offset, entry.offset + entry.numel)
            for g in range(groups):
                ranks = range(g * local, (g + 1) * local)
                y = left[g, entry.name] + sum(gradient(i, t)[where] for i in ranks) / local
                share = codec.decode(codec.encode(y), entry.numel)
                left[g, entry.name] = y - share
                mean[where] += share / groups
        means.append(mean)
    return means


@every_mesh
def test_it_does_what_one_memory_a_machine_would(size, local):
    """To rounding: the leader's memory holds `local` times what is left, and it travels inside first."""

    def play(comm):
        exchange, buckets = exchange_on(comm, spec_of(local)), cut(MODEL, 1, 2, 1)
        return [one_step(exchange, gradient(comm.rank, t), buckets)[0] for t in range(STEPS)]

    results = everywhere(size, play)
    for means in results:
        for mean, first, expected in zip(means, results[0], twin(size, local), strict=True):
            assert torch.equal(mean, first), "replicas are bit-identical"
            for entry in MATRICES:
                where = slice(entry.offset, entry.offset + entry.numel)
                torch.testing.assert_close(mean[where], expected[where], rtol=1e-4, atol=1e-4)


@every_mesh
def test_the_average_of_what_was_sent_is_the_mean_and_dense_levels_give_the_plain_one(size, local):
    plain = sum(gradient(rank, 0) for rank in range(size)) / size

    def play(comm):
        x, outs, shares = gradient(comm.rank, 0), [], []
        for alpha in (1.0, 3.0):
            bound, out = parse(spec_of(local)).bind(MODEL, comm), torch.full((MODEL.numel,), 7.0)
            sent = bound.reduce(x, MODEL, Turn(0, comm.rank), out, alpha)
            share = sent.add_to_(torch.zeros_like(x))
            torch.testing.assert_close(sent.subtract_from_(x.clone()), x - share, rtol=1e-5, atol=1e-4)
            assert not sent.clear_(x.clone())[share != 0].any()
            if comm.rank % local:
                assert torch.equal(share, x), "all of it went to the leader"
            outs.append(out / alpha)
            shares.append(share)
        bound, out, in_place = (
            parse(spec_of(local, "sum()")).bind(MODEL, comm),
            torch.empty_like(x),
            x.clone(),
        )
        bound.reduce(x, MODEL, Turn(0, comm.rank), out)
        bound.reduce(in_place, MODEL, Turn(0, comm.rank), in_place)
        assert torch.equal(in_place, out)
        torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)
        return torch.stack(outs), torch.stack(shares)

    results = everywhere(size, play)
    average = sum(share.double() for _, share in results) / size
    for out, _ in results:
        assert torch.equal(out, results[0][0])
        torch.testing.assert_close(out.double(), average, rtol=1e-5, atol=1e-4)


@for_each("bad", [{0}, {1}, {2, 3}, {0, 1, 2, 3}])
@for_each("outer", [TOPK, SERVER, "sum()"])
def test_one_rank_that_is_not_finite_voids_all(bad, outer):
    """Leaders and others, told by a feedback or seen in the bucket itself."""

    def play(comm):
        bound, x = parse(spec_of(2, outer)).bind(MODEL, comm), gradient(comm.rank, 0)
        out = torch.empty_like(x)
        told = bound.reduce(None if comm.rank in bad else x, MODEL, Turn(0, comm.rank), out)
        x[7] = math.inf if comm.rank in bad else x[7]
        seen = bound.reduce(x, MODEL, Turn(1, comm.rank), x)
        good = bound.reduce(gradient(comm.rank, 1), MODEL, Turn(2, comm.rank), out)
        return told is None, seen is None, good is not None and bool(out.isfinite().all())

    assert everywhere(4, play) == [(True, True, True)] * 4


@for_each("outer", [TOPK, SERVER, "powersgd(rank=1)"])
@for_each("size, local", [(4, 2), (4, 4), (3, 1)])
def test_nothing_is_lost(outer, size, local):
    """All gradients = N * (all means + what servers hold) + what the ranks hold. To float32, 6 steps."""
    assert lost(spec_of(local, outer), size, "once/server")[0] <= 1e-5


@for_each("outer", [TOPK, SERVER, "powersgd(rank=1)"])
def test_a_void_step_leaves_every_memory_as_it_was(outer):
    inf_at = MODEL["a.weight"].offset + 77

    def play(comm):
        exchange = exchange_on(comm, spec_of(2, outer))
        for t in range(4):
            flat = gradient(comm.rank, t)
            before = {key: value for key, value in exchange.state_dict().items() if "once" in key}
            if t == 2 and comm.rank == 3:
                flat[inf_at] = math.inf
            _, valid = one_step(exchange, flat, cut(MODEL, 1, 2, 1) if t < 1 else cut(MODEL, 2, 1, 1))
            assert valid == (t != 2)
            after = exchange.state_dict()
            assert all(bool(value.isfinite().all()) for value in after.values())
            if t == 2:
                assert all(torch.equal(value, after[key]) for key, value in before.items())

    everywhere(4, play)


@for_each("outer", [TOPK, SERVER, "powersgd(rank=1)", "adaptive_bits(every=2)"])
def test_a_resumed_run_ends_with_the_same_bits(outer):
    assert resumed(spec_of(2, outer), size=4) == [[True] * 3] * 4


def test_resizing_keeps_what_leaders_hold():
    """What 4 ranks on 2 machines hold back, 2 ranks on one apply."""
    four = states(4, spec_of(2))
    results = reloaded(laconic.resize(four, 2), spec_of(2), steps=40)
    for entry in MATRICES:
        where = slice(entry.offset, entry.offset + entry.numel)
        key = f"route0/residual/{entry.name}"
        mass = sum(state["tensors"][f"rank{state['rank']}/{key}"].flatten() for state in four) / 4
        assert mass.any()
        for _, applied in results:
            torch.testing.assert_close(applied[where], mass, rtol=1e-4, atol=1e-4)


def test_only_leaders_send_between_machines_and_nbytes_bounds_them():
    layout = Layout.of([("w", (100, 100))])
    spec = parse(spec_of(2))

    def play(comm):
        comm, x = Metered(comm), torch.randn(layout.numel, generator=torch.Generator().manual_seed(comm.rank))
        bound = spec.bind(layout, comm)
        comm.reset()
        bound.reduce(x, layout, Turn(0, comm.rank), torch.empty_like(x))
        return comm.snapshot()

    topk = parse(TOPK).nbytes(layout)
    for rank, meter in enumerate(everywhere(4, play)):
        parts = {name: part.payload_sent for (_, name), part in meter.parts.items()}
        leads = rank in (0, 2)
        assert parts.pop("all_gather", 0) == (topk if leads else 0)
        assert parts == {"all_reduce": 40_000, "broadcast": 40_004 if leads else 0}
        assert meter.payload_sent <= spec.nbytes(layout)


def test_what_may_stand_inside():
    spec = parse(spec_of(1, "shared_scale()"))
    assert spec.unaccountable and not spec.needs_feedback, "what nobody can account for takes no feedback"
    assert not parse(spec_of(1, "majority_vote()")).exact_mean
    for text, words in (
        ("topk(density=0.1), sum()", r"two_level: inner must be a reducer, such as sum\(\), got topk"),
        ("sum(), cast('bf16')", r"two_level: outer must be a reducer"),
        ("sum(), sum(), ranks_per_node=-1", "two_level: ranks_per_node must be a whole number of 0 or more"),
    ):
        refuses(SpecError, words, parse, f"two_level({text})")
    alone, stateful = Loopback.world(1)[0], parse("two_level(powersgd(), sum(), ranks_per_node=1)")
    words = r"two_level: inner must be stateless, such as sum\(\), got powersgd"
    refuses(SpecError, words, stateful.bind, MODEL, alone)
    wild = "gather(sparse(topk(density=0.1), values=qsgd(levels=1, block=0)))"
    large, diverging = Layout.of([("w", (300, 300))]), parse(spec_of(1, wild, "gather(cast('bf16'))"))
    refuses(SpecError, "error feedback diverges", diverging.bind, large, alone)


TOLD = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def told(ranks):
    """The environments of these ranks, which are (machine's first rank, place there, how many there are)."""
    return [dict(zip(TOLD, map(str, (first + at, at, size)), strict=True)) for first, at, size in ranks]


UNEVEN = told([(0, 0, 3), (0, 1, 3), (0, 2, 3), (3, 0, 1), (4, 0, 1)])


def test_machines_of_different_sizes_weigh_as_many_ranks_as_they_have(monkeypatch):
    plain = sum(gradient(rank, 0) for rank in range(5)) / 5
    module = importlib.import_module("laconic.reducers.two_level")
    monkeypatch.setattr(module, "machines", lambda comm, local: machines(comm, local, UNEVEN[comm.rank]))

    def play(comm):
        assert machines(comm, 0, UNEVEN[comm.rank]) == [0, 0, 0, 1, 2]
        out, x = torch.empty(MODEL.numel), gradient(comm.rank, 0)
        for outer in ("sum()", TOPK):
            bound = TwoLevel(parse("sum()"), parse(outer)).bind(MODEL, comm)
            sent = bound.reduce(x, MODEL, Turn(0, comm.rank), out)
            if outer == "sum()":
                torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)
        return out, sent.add_to_(torch.zeros_like(x))

    results = everywhere(5, play)
    average = sum(share.double() for _, share in results) / 5
    for out, _ in results:
        torch.testing.assert_close(out.double(), average, rtol=1e-5, atol=1e-4)


def refused(environments):
    """What every rank says of these environments."""

    def play(comm):
        with pytest.raises(SpecError) as error:
            machines(comm, 0, environments[comm.rank])
        return str(error.value)

    said = everywhere(len(environments), play)
    assert len(set(said)) == 1, "all ranks say the same"
    return said[0]


def test_ranks_that_do_not_fit_together_are_refused_on_every_rank():
    good = told([(0, 0, 2), (0, 1, 2)])
    assert "rank 1 does not know its machine: RANK, LOCAL_RANK" in refused([good[0], {}])
    assert "rank 0 does not know" in refused([{**good[0], "LOCAL_RANK": "two"}, good[1]])
    assert "rank 1 does not know" in refused([good[0], {**good[1], "LOCAL_RANK": "2"}])
    assert "machines overlap: they start at ranks [0, 0]" in refused([good[0], good[0]])
    other = {**good[1], "LOCAL_WORLD_SIZE": "3"}
    assert "and have [2, 3] ranks (LOCAL_WORLD_SIZE); number ranks" in refused([good[0], other])
    in_turn = told([(0, 0, 2), (1, 0, 2), (1, 1, 2), (2, 1, 2)])  # rank r is on machine r mod 2
    assert "they start at ranks [0, 1, 1, 2]" in refused(in_turn)


@for_each("size, local", [(5, 2), (4, 3), (2, 4)])
def test_a_mesh_that_does_not_divide_is_refused_on_every_rank(size, local):
    reducer = parse(f"two_level(sum(), sum(), ranks_per_node={local})")
    words = f"ranks_per_node={local} does not divide the {size} ranks"
    everywhere(size, lambda comm: refuses(SpecError, words, reducer.bind, MODEL, comm))


def test_a_part_of_the_world_keeps_its_machines():
    """A group of every other rank of 2 machines of 4, as torchrun numbers them."""
    some = told([(0, 0, 4), (0, 2, 4), (4, 0, 4), (4, 2, 4)])
    assert everywhere(4, lambda comm: machines(comm, 0, some[comm.rank])) == [[0, 0, 1, 1]] * 4


class Left(Loopback):
    """Of eight ranks these are left."""

    original_ranks, original_size = (1, 2, 3, 6), 8


def test_machines_that_have_lost_ranks_are_still_the_same_machines():
    left = Left(Loopback.world(4)[0].room, 0)
    assert machines(left, ranks_per_node=2) == [0, 1, 1, 2]
    assert machines(left, ranks_per_node=4) == [0, 0, 0, 1]
    refuses(SpecError, "ranks_per_node=3 does not divide the 8 ranks", machines, left, ranks_per_node=3)
