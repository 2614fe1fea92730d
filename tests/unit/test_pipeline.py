"""Change coding without processes: both sides of a boundary in one, and what specs say."""

from __future__ import annotations

import resource
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.unit.shared import for_each, refuses

import laconic
from laconic.comm.loopback import Loopback
from laconic.core.errors import AttachError, NonFiniteError, PeerError, SpecError, StateError, WireError
from laconic.data.memory import InRam
from laconic.data.on_disk import OnDisk
from laconic.pipeline.buffer import Buffer
from laconic.pipeline.changes import Changes
from laconic.pipeline.channel import Coded, Visit
from laconic.pipeline.compress import check_version
from laconic.pipeline.message import HEADER, PeerFailed, opened, sealed
from laconic.pipeline.place import Place
from laconic.pipeline.step import Step, checked_ids

ROWS, LONG, WIDE, SAMPLES = 4, 32, 64, 16
CPU = torch.device("cpu")


def side(spec, keep="dense()", shape=(ROWS, LONG, WIDE)):
    """One side of a boundary."""
    change, kept = laconic.parse(spec), laconic.parse(keep)
    return Changes(
        "0>1:0", torch.Size(shape), torch.float32, 7, change, kept, SAMPLES, lambda _, n: InRam(SAMPLES, n)
    )


def settling(epoch):
    """Activations (samples, long, wide) whose change by epoch is 0.1 * 0.73^epoch of them."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, LONG, WIDE, generator=rng)
    for past in range(epoch + 1):
        x = x + 0.1 * 0.73**past * torch.randn(SAMPLES, LONG, WIDE, generator=rng)
    return x


def passed(sender, receiver, a, visit, out):
    """A body from one side to the other; what arrives goes to `out`."""
    body = sender.encode(a, visit)
    receiver.decode_(body, out, visit)
    return body


def errors(channels, epochs):
    """Relative errors, by epoch, of what arrives."""
    found = []
    for epoch in range(epochs):
        a, arrived = settling(epoch), torch.zeros(SAMPLES, LONG, WIDE)
        for micro, ids in enumerate(torch.arange(SAMPLES).split(ROWS)):
            passed(*channels, a[ids], Visit(epoch, micro, ids), arrived[ids[0] : ids[0] + ROWS])
        found.append(float((arrived - a).norm() / a.norm()))
    return found


def test_two_bit_changes_settle_while_two_bits_of_the_activation_do_not():
    codec = "minmax(bits=2, block=64)"
    change = errors((side(f"change({codec}, first='fp32')"), side(f"change({codec}, first='fp32')")), 9)
    shape = torch.Size((ROWS, LONG, WIDE))
    direct = errors([Coded("0>1:0", shape, torch.float32, 7, laconic.parse(codec)) for _ in range(2)], 9)
    assert change[0] == 0
    assert all(after < before for before, after in pairwise(change[1:]))
    assert change[1] == pytest.approx(0.041, rel=0.3)
    assert change[1] / change[8] > 5
    assert all(error == pytest.approx(0.41, abs=0.05) for error in direct)
    assert change[8] < direct[8] / 50


@for_each(
    "keep", ["dense()", "cast('fp16')", "cast('bf16')", "minmax(bits=8)", "minmax(8, 16, 'stochastic')"]
)
@for_each("spec", laconic.parse("change(dense())").examples)
def test_what_arrives_is_what_both_sides_keep(spec, keep):
    sender, receiver = side(spec, keep), side(spec, keep)
    for epoch in range(3):
        for micro, ids in enumerate(
            torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).split(ROWS)
        ):
            visit, out = Visit(epoch, micro, ids), torch.zeros(ROWS, LONG, WIDE)
            body = sender.encode(settling(epoch)[ids], visit)
            assert body.numel() <= receiver.room(visit) <= receiver.most
            receiver.decode_(body, out, visit)
            for row, sample in zip(out, ids.tolist(), strict=True):
                kept = sender.keep.decode(sender.buffer.memory.read(sample), sender.n)
                turned = row.T if sender.change.along == "channels" else row
                assert torch.equal(turned.flatten(), kept)
        assert sender.buffer.digest() == receiver.buffer.digest() != ""
    assert sender.buffer.first_visits == SAMPLES and sender.buffer.changes == 2 * SAMPLES


def test_hundreds_of_visits_leave_both_sides_equal_whatever_their_order():
    """Of a random walk, two samples a visit, by two bits."""
    sender, receiver = (side("change(minmax(bits=2, block=16))", shape=(2, 2, 16)) for _ in range(2))
    rng = torch.Generator().manual_seed(0)
    x, out = torch.randn(SAMPLES, 2, 16, generator=rng), torch.zeros(2, 2, 16)
    for step in range(400):
        visit = Visit(step, 0, torch.randperm(SAMPLES, generator=rng)[:2])
        x += 0.1 * torch.randn(x.shape, generator=rng)
        passed(sender, receiver, x[visit.ids], visit, out)
    assert sender.buffer.digest() == receiver.buffer.digest() != ""
    assert sender.buffer.changes == receiver.buffer.changes == 800 - SAMPLES
    assert float((out - x[visit.ids]).norm() / out.norm()) < 0.5


def test_scales_are_by_row_or_by_channel():
    """Channels (or rows) of very different size: the error is small where each has its own scale."""
    sizes, lost = 10.0 ** torch.linspace(-3, 3, WIDE), {}
    for along, block in (("rows", WIDE), ("channels", LONG)):
        sender, receiver = (side(f"change(minmax(8, {block}), 'fp32', along='{along}')") for _ in range(2))
        out = torch.zeros(ROWS, LONG, WIDE)
        for epoch in range(2):
            a = settling(epoch)[:ROWS] * sizes
            passed(sender, receiver, a, Visit(epoch, 0, torch.arange(ROWS)), out)
        lost[along] = float(((out - a) / sizes).abs().max())
    assert lost["channels"] < 0.01 < 1 < lost["rows"]


@for_each("spec", ["change(minmax(bits=4))", "change(sparse(topk(density=0.1)))"])
def test_a_cut_or_lengthened_body_raises_and_writes_nothing(spec):
    sender, receiver = side(spec), side(spec)
    visit, out = Visit(0, 0, torch.arange(ROWS)), torch.zeros(ROWS, LONG, WIDE)
    receiver.decode_(sender.encode(settling(0)[:ROWS], visit), out, visit)
    body, before = sender.encode(settling(1)[:ROWS], visit), receiver.buffer.digest()
    for wrong in (body[:-1], body[:3], torch.cat([body, body[:1]]), body[:0]):
        refuses(WireError, ".", receiver.decode_, wrong.clone(), out, visit)
        assert receiver.buffer.digest() == before


def test_messages_are_checked():
    body = torch.arange(5, dtype=torch.uint8)
    assert torch.equal(opened(sealed(body, 9, CPU), 9), body)
    assert torch.equal(opened(sealed(body, 9, CPU, room=HEADER.size + 11), 9), body)
    for words, message, number in (
        ("disagree", sealed(body, 9, CPU), 8),
        ("announces", sealed(body, 9, CPU)[:-1], 9),
        ("not a message", torch.zeros(HEADER.size, dtype=torch.uint8), 9),
    ):
        refuses(WireError, words, opened, message, number)
    with pytest.raises(PeerFailed):
        opened(sealed(None, 0, CPU), 9)
    sender, receiver = side("change(minmax(bits=4))"), side("change(minmax(bits=4))")
    ids, x = torch.tensor([3, 1, 0, 2]), settling(0)[:ROWS].clone()
    for step in range(2):
        visit = Visit(step, 0, ids)
        room = receiver.room(visit)
        assert receiver.encode(settling(0)[ids], visit).numel() == room, (
            "fixed codecs fill their room exactly"
        )
    assert room == ROWS * receiver.change.codec.nbytes(LONG * WIDE)
    x[2, 0, 0] = float("nan")
    refuses(NonFiniteError, ".", sender.encode, x, Visit(0, 0, torch.arange(ROWS)))
    assert not sender.buffer.seen.any() and sender.buffer.changes == sender.buffer.first_visits == 0


def test_rows_on_disk_are_those_in_ram(tmp_path):
    ram, disk = InRam(SAMPLES, 33), OnDisk(SAMPLES, 33, tmp_path / "deeper" / "rows")
    rng = torch.Generator().manual_seed(0)
    for turn in range(200):
        now = torch.randperm(SAMPLES, generator=rng)[:5].tolist()
        soon = torch.randperm(SAMPLES, generator=rng)[:5].tolist()
        disk.prefetch([*now, *soon])
        for sample in now:
            assert torch.equal(ram.read(sample), disk.read(sample)), turn
            row = torch.randint(256, (33,), dtype=torch.uint8, generator=rng)
            ram.write(sample, row)
            disk.write(sample, row)
    disk.flush()
    seen = torch.ones(SAMPLES, dtype=torch.bool)
    assert ram.digest(seen) == disk.digest(seen)
    assert torch.equal(ram.rows(seen), disk.rows(seen))
    assert disk.path.stat().st_size == SAMPLES * 33
    disk.close()
    assert not disk.path.exists()


def test_memories_of_one_path_do_not_share_a_file_and_take_over_what_a_killed_run_left(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(b"of a run that was killed" * 9)
    one, two = OnDisk(SAMPLES, 4, path), OnDisk(SAMPLES, 4, path)
    assert one.path == path != two.path
    for memory, value in ((one, 1), (two, 2)):
        memory.write(3, torch.full((4,), value, dtype=torch.uint8))
    for memory, value in ((one, 1), (two, 2)):
        memory.flush()
        memory.prefetch([])
        memory.flush()
        assert memory.read(3).tolist() == [value] * 4
        assert memory.read(0).tolist() == [0] * 4
        memory.close()
    assert not list(tmp_path.iterdir())


def test_memory_takes_pages_as_they_are_written_and_a_full_disk_says_the_size_needed(tmp_path):
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    memory = InRam(1000, 400_000)
    assert resident() - before < 40_000_000  # of 400 MB
    assert not memory.read(999).any()
    memory.write(7, torch.ones(400_000, dtype=torch.uint8))
    assert memory.read(7).all()
    words = r"needs 1,125,899,906,842,624 bytes"
    refuses(StateError, words, OnDisk, 1 << 30, 1 << 20, tmp_path / "rows")


@for_each("most, words", [(None, "free memory allows 80"), (100, "most_bytes allows 100")])
def test_bounds_of_several_buffers_add_up(monkeypatch, most, words):
    """A buffer of 60 bytes is promised, and 20 of them are taken; another of 40 fits, then none of 10."""
    monkeypatch.setattr("laconic.pipeline.place.free_ram", lambda: 80)
    place, opened = Place(None, most), []
    for samples, seen in ((6, 2), (4, 0)):
        memory = place.open("0>1:0", samples, 10, opened, 0)
        buffer = Buffer(samples, lambda memory=memory: memory)
        assert buffer.memory is memory
        buffer.seen[:seen] = True
        opened.append(buffer)
    refuses(StateError, words, place.open, "2>3:0", 1, 10, opened, 0)


def test_what_a_step_changes_waits_for_its_end():
    sender, receiver = side("change(minmax(bits=4))"), side("change(minmax(bits=4))")
    out, ids = torch.zeros(ROWS, LONG, WIDE), torch.arange(ROWS)
    for epoch, ends in enumerate((False, True, False, True)):
        before, version = sender.buffer.digest(), sender.buffer.version
        for micro in range(2):
            visit = Visit(epoch, micro, ids + ROWS * micro, may_fail=True)
            receiver.decode_(sender.encode(settling(epoch)[visit.ids], visit), out, visit)
        for each in (sender.buffer, receiver.buffer):
            assert each.version == version and (epoch == 0 or each.digest() == before)
            (each.settle if ends else each.discard)()
        assert (sender.buffer.digest(), sender.buffer.version) == (
            receiver.buffer.digest(),
            receiver.buffer.version,
        )
        assert (sender.buffer.version != version) == ends
    assert sender.buffer.first_visits == sender.buffer.changes == 2 * ROWS


def test_ac_sgd_is_its_pair_of_codings():
    method = laconic.parse("ac_sgd(forward=2, backward=6, block=32, rounding='stochastic', first='fp16')")
    forward = "change(minmax(bits=2, block=32, rounding='stochastic'), first='fp16')"
    assert repr(method.forward_coding) == forward
    assert repr(method.backward_coding) == "minmax(bits=6, block=32, rounding='stochastic')"
    assert laconic.parse(repr(method)) == method
    for wrong in ("ac_sgd(forward=0)", "ac_sgd(backward=9)", "ac_sgd(first='int8')", "change(sum())"):
        refuses(SpecError, ".", laconic.parse, wrong)
    check_version("2.13.0+cpu")
    for other in ("2.12.1", "2.14.0+cpu", "3.0"):
        refuses(AttachError, "tested with", check_version, other)


def test_items_come_with_their_index():
    items = laconic.data.with_ids([(float(i), -i) for i in range(10)])
    for ids, x, y in torch.utils.data.DataLoader(items, batch_size=5, shuffle=True):
        assert ids.dtype == torch.int64 and torch.equal(x, ids.double()) and torch.equal(y, -ids)
    assert laconic.data.with_ids(["a", "b"])[1] == (1, "b")
    refuses(TypeError, "length", laconic.data.with_ids, iter([1]))
    assert torch.equal(checked_ids([3, 1], 4), checked_ids(torch.tensor([3, 1], dtype=torch.int32), 4))


def test_ranks_go_on_from_the_highest_step_after_a_failure():
    """A lower number would draw the keys of a step again."""

    def body(comm):
        step = Step(number=(3, 5)[comm.rank])
        step.begin()
        if comm.rank == 0:
            step.fail(PeerError("a link broke"), "stage 1")
        with pytest.raises(PeerError, match="rank 0: stage 1: a link broke"):
            step.end(comm)
        return step.number

    assert Loopback.run(2, body) == [5, 5]
