"""CLT-k and global top-k against plain twins, and what rotates, survives and stays within k."""

from __future__ import annotations

import pytest
import torch
from tests.laws.worlds import MODEL, cut, everywhere, exchange_on, gradient, one_step
from tests.unit.shared import for_each, refuses, same

from laconic.comm.messages import sent_by
from laconic.comm.metered import Metered
from laconic.core.errors import SpecError, WireError
from laconic.core.layout import Layout, Segments
from laconic.core.selector import kept
from laconic.core.spec import parse
from laconic.core.turn import Turn
from laconic.reducers.entries import Entries, contained, counted

DENSITY = 0.03
SIZES = (1, 2, 4, 5, 8)
MATRICES = [entry for entry in MODEL if len(entry.shape) > 1]
STEPS = 6


def largest(x, k):
    """Mask of the k largest |x|, the lower index first among equals, no zeros: by sorting."""
    order = x.abs().sort(descending=True, stable=True).indices[:k]
    mask = torch.zeros(x.numel(), dtype=torch.bool)
    mask[order] = True
    return mask & (x != 0)


def leaders(xs, k, step):
    """CLT-k of one tensor: the mean, and what each rank sent."""
    mask = largest(xs[step % len(xs)], k)
    sent = [x * mask for x in xs]
    return sum(x / len(xs) for x in sent), sent


def everyones(xs, k, step):
    """Global top-k of one tensor: the mean, and what each rank sent."""
    masks = [largest(x, k) for x in xs]
    total = torch.zeros_like(xs[0])
    for x, mask in zip(xs, masks, strict=True):
        total += x * mask * (1 / len(xs))
    final = largest(total, k)
    return total * final, [x * mask * final for x, mask in zip(xs, masks, strict=True)]


def twin(step_of, size):
    """Error feedback around it, tensor by tensor: the means of every step."""
    left = {(rank, entry.name): torch.zeros(entry.numel) for rank in range(size) for entry in MATRICES}
    means = []
    for t in range(STEPS):
        mean = torch.zeros(MODEL.numel)
        for entry in MATRICES:
            where = slice(entry.offset, entry.offset + entry.numel)
            xs = [left[rank, entry.name] + gradient(rank, t)[where] for rank in range(size)]
            mean[where], sent = step_of(xs, kept(DENSITY, entry.numel), t)
            for rank in range(size):
                left[rank, entry.name] = xs[rank] - sent[rank]
        means.append(mean)
    return means


@for_each("name, step_of", [("cltk", leaders), ("gtopk", everyones), ("oktopk", everyones)])
@for_each("size", SIZES)
def test_it_is_its_plain_twin_bit_for_bit(name, step_of, size):
    """Loopback sums in rank order, as the twins do."""

    def play(comm):
        exchange, buckets = exchange_on(comm, f"{name}(density={DENSITY})"), cut(MODEL, 1, 2, 1)
        return [one_step(exchange, gradient(comm.rank, t), buckets)[0] for t in range(STEPS)]

    expected = twin(step_of, size)
    for means in everywhere(size, play):
        for mean, plain in zip(means, expected, strict=True):
            for entry in MATRICES:
                where = slice(entry.offset, entry.offset + entry.numel)
                assert torch.equal(mean[where], plain[where]), entry.name


@for_each("size", [1, 3])
def test_every_rank_leads_in_turn_and_only_it_sends_positions(size):
    layout = Layout.of([("w", (40, 25))])

    def play(comm):
        metered = Metered(comm)
        bound = parse("cltk(density=0.01)").bind(layout, metered)
        sent = []
        for step in range(2 * size):
            x = torch.zeros(layout.numel)
            x[comm.rank * 100 : comm.rank * 100 + 10] = 1.0  # its own ten, which no other rank has
            out = torch.empty(layout.numel)
            metered.reset()
            bound.reduce(x, layout, Turn(step, comm.rank), out)
            told = metered.snapshot().parts[("", "broadcast")].payload_sent
            sent.append((out.nonzero().flatten().tolist(), told > 0))
        return sent

    for rank, sent in enumerate(everywhere(size, play)):
        for step, (changed, told) in enumerate(sent):
            leader = step % size
            assert changed == list(range(leader * 100, leader * 100 + 10))
            assert told == (rank == leader)


@for_each("name", ["cltk", "gtopk", "oktopk"])
def test_large_values_do_not_overflow(name):
    layout = Layout.of([("w", (10, 10))])

    def play(comm):
        out = torch.empty(100)
        bound = parse(f"{name}(density=0.1)").bind(layout, comm)
        sent = bound.reduce(torch.full((100,), 3e38), layout, Turn(0, comm.rank), out)
        return sent is not None and bool((out[:10] == 3e38).all()) and not bool(out[10:].any())

    assert everywhere(4, play) == [True] * 4


@for_each("name", ["cltk", "gtopk", "oktopk"])
@for_each("density", [0.0, 1.5, -1, "1", True])
def test_a_wrong_density_is_refused(name, density):
    refuses(SpecError, "density must be a number in", lambda: parse(f"{name}(density={density!r})"))


def entries():
    segments = Segments.consecutive([50, 0, 7])
    x = torch.randn(57, generator=torch.Generator().manual_seed(0))
    return Entries.largest(x, segments, torch.tensor([9, 0, 3])), segments


def test_entries_survive_the_wire():
    given, segments = entries()
    back = Entries.read(given.wire(segments), segments)
    assert same(vars(given).values(), vars(back).values())


def test_a_damaged_wire_is_refused_or_read_within_bounds():
    """Cut at every byte it is refused; with any byte changed it is refused, or its entries lie inside."""
    given, segments = entries()
    wire = given.wire(segments)
    for length in range(wire.numel()):
        with pytest.raises(WireError, match="the message that rank 3 sent is damaged"), sent_by(3):
            Entries.read(wire[:length].clone(), segments)
    refused = 0
    for at in range(wire.numel()):
        changed = wire.clone()
        changed[at] ^= 0x55
        try:
            back = Entries.read(changed, segments)
        except WireError:
            refused += 1
            continue
        sizes = torch.repeat_interleave(segments.sizes_tensor, back.counts)
        assert bool(((back.indices >= 0) & (back.indices < sizes)).all())
    assert refused >= 12, "of all counts at least"


def test_sets_of_positions():
    mask, counts = torch.tensor([True, True, False, True]), torch.tensor([0, 1, 3, 0])
    assert counted(mask, counts).tolist() == [0, 1, 2, 0]
    nothing = torch.empty(0, dtype=torch.int64)
    assert contained(torch.tensor([3]), nothing).tolist() == [False]
    assert contained(nothing, torch.tensor([3])).tolist() == []
