# mypy: disable-error-code="no-untyped-def, untyped-decorator, unused-ignore"
"""Sparse messages with Rice-coded positions in Triton: few launches for any number of tensors and ranks.

A message of s tensors, of which k_i entries each are chosen, K together:

    counts k_i   uint32 (s,)
    m            uint32
    positions    uint8 (m,)    as `rice_encode` makes them
    values       float32 (K,)

Encoding: `measure_kernel` finds how long each tensor's high parts are, `write_kernel` writes the message.
Decoding: `ones_kernel` reads heads and finds the ends of the unary numbers, a program for each message;
`places_kernel` computes positions and checks them, a program for each tensor of each message; `add_kernel`
adds the entries of a tensor in the order of the messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton  # type: ignore[import-not-found,import-untyped]
import triton.language as tl  # type: ignore[import-not-found,import-untyped]
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels import dispatch
from laconic.kernels.entropy.tables import uploaded
from laconic.kernels.launch import launch
from laconic.kernels.tiles import table

COLUMNS = tl.constexpr(4)  # of the table of a message: count, first entry, Rice parameter, start of low bits
FACTS = tl.constexpr(2)  # of a message: entries, bytes of positions
INFINITE = tl.constexpr(0x7F800000)  # these bits are all ones in Inf and NaN
SEGMENTS, BITS, ENTRIES = 256, 4096, 1024  # that a program works on at once


@triton.jit
def _parameter(k, n):
    """Return the Rice parameter of k of n: the number of r with 320 k 2^r < 77 (2 n - k)."""
    most = 77 * (2 * n - k) - 1
    r = tl.zeros_like(k)
    for shift in tl.static_range(31):
        r += ((most >> shift) >= 320 * k).to(tl.int64)
    return tl.where(k > 0, r, 0)


@triton.jit
def _word(at, mask):
    """Return four bytes, little-endian, as int32; 0 where there are none."""
    value = tl.load(at, mask=mask, other=0).to(tl.int32)
    value |= tl.load(at + 1, mask=mask, other=0).to(tl.int32) << 8
    value |= tl.load(at + 2, mask=mask, other=0).to(tl.int32) << 16
    return value | (tl.load(at + 3, mask=mask, other=0).to(tl.int32) << 24)


@triton.jit
def _set_bits(words, bit, value, mask):
    """Or value int64, of up to 32 bits, into words int32 from this bit on."""
    shifted = value << (bit & 31)
    upper = (shifted >> 32).to(tl.int32)
    at = words + (bit >> 5)
    tl.atomic_or(at, shifted.to(tl.int32), mask=mask, sem="relaxed")
    tl.atomic_or(at + 1, upper, mask=mask & (upper != 0), sem="relaxed")


@triton.jit
def _gaps(indices, first, lane, k):
    """Return indices and the gaps before them, int64, of entries of a segment, 0 for lanes from k on."""
    there = lane < k
    index = tl.load(indices + first + lane, mask=there, other=0).to(tl.int64)
    before = tl.load(indices + first + lane - 1, mask=there & (lane > 0), other=-1).to(tl.int64)
    return index, tl.where(there, index - before - 1, 0)


@triton.jit(do_not_specialize=["num"])
def measure_kernel(indices, counts, sizes, highs, num, SEGMENTS: tl.constexpr, ENTRIES: tl.constexpr):
    """Write the sum of high parts of a segment, or -1 where its indices do not ascend."""
    segment = tl.program_id(0)
    k, n = tl.load(counts + segment), tl.load(sizes + segment)
    r = _parameter(k, n)
    first = tl.zeros([1], tl.int64)
    for at in range(0, num, SEGMENTS):
        lane = at + tl.arange(0, SEGMENTS)
        first += tl.sum(tl.load(counts + lane, mask=lane < segment, other=0), 0)
    total = tl.zeros([1], tl.int64)
    wrong = tl.zeros([1], tl.int32)
    for at in range(0, k, ENTRIES):
        lane = at + tl.arange(0, ENTRIES)
        index, gap = _gaps(indices, first, lane, k)
        total += tl.sum(gap >> r, 0)
        wrong |= tl.max(((gap < 0) | (index >= n)).to(tl.int32), 0)
    tl.store(highs + segment + tl.arange(0, 1), tl.where(wrong > 0, -1, total))


@triton.jit(do_not_specialize=["num"])
def write_kernel(
    x,
    indices,
    counts,
    sizes,
    starts,
    highs,
    num,
    words,
    facts,
    chosen,
    places,
    SEGMENTS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Write a segment's part of the message into words int32 of zeros, its values and its positions."""
    segment = tl.program_id(0)
    k, n = tl.load(counts + segment), tl.load(sizes + segment)
    r = _parameter(k, n)
    first, entries = tl.zeros([1], tl.int64), tl.zeros([1], tl.int64)
    low, all_low = tl.zeros([1], tl.int64), tl.zeros([1], tl.int64)
    high, all_high = tl.zeros([1], tl.int64), tl.zeros([1], tl.int64)
    wrong = tl.zeros([1], tl.int32)
    for at in range(0, num, SEGMENTS):
        lane = at + tl.arange(0, SEGMENTS)
        each = tl.load(counts + lane, mask=lane < num, other=0)
        size = tl.load(sizes + lane, mask=lane < num, other=0)
        lows = (each * _parameter(each, size) + 7) >> 3
        sums = tl.load(highs + lane, mask=lane < num, other=0)
        before = lane < segment
        first += tl.sum(tl.where(before, each, 0), 0)
        low += tl.sum(tl.where(before, lows, 0), 0)
        high += tl.sum(tl.where(before, sums, 0), 0)
        entries += tl.sum(each, 0)
        all_low += tl.sum(lows, 0)
        all_high += tl.sum(sums, 0)
        wrong |= tl.max((sums < 0).to(tl.int32), 0)
    nbytes = all_low + ((entries + all_high + 7) >> 3)
    head = 32 * (num + 1).to(tl.int64)
    one = tl.arange(0, 1)
    tl.store(words + segment, k.to(tl.int32))
    tl.store(words + num + one, nbytes.to(tl.int32), mask=segment == 0)
    tl.store(facts + one, nbytes, mask=segment == 0)
    tl.store(facts + 1 + one, wrong.to(tl.int64), mask=segment == 0)
    start = tl.load(starts + segment)
    low_bit = head + 8 * low
    unary_bit = head + 8 * all_low + first + high
    value_bit = head + 8 * nbytes
    for at in range(0, tl.where(tl.sum(wrong, 0) == 0, k, 0), ENTRIES):
        lane = at + tl.arange(0, ENTRIES)
        there = lane < k
        index, gap = _gaps(indices, first, lane, k)
        q = gap >> r
        ends = tl.cumsum(q, 0)
        _set_bits(words, low_bit + lane * r, gap & ((1 << r) - 1), there & (r > 0))
        _set_bits(words, unary_bit + lane + ends, tl.full([ENTRIES], 1, tl.int64), there)
        unary_bit += tl.sum(q, 0)
        value = tl.load(x + start + index, mask=there, other=0.0)
        bits = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        _set_bits(words, value_bit + 32 * (first + lane), bits, there)
        tl.store(chosen + first + lane, value, mask=there)
        tl.store(places + first + lane, start + index, mask=there)


@triton.jit(do_not_specialize=["num", "messages", "rooms"], do_not_specialize_on_alignment=["base"])
def ones_kernel(
    base,
    where,
    sizes,
    num,
    messages,
    rooms,
    rows,
    facts,
    flags,
    ends,
    SEGMENTS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Read the head of a message, and store where the ones of its unary part are."""
    message = tl.program_id(0)
    wire = base + tl.load(where + message)
    length = tl.load(where + messages + message)
    room = tl.load(where + 2 * messages + message)
    rows += message.to(tl.int64) * num * COLUMNS
    one = tl.arange(0, 1)
    entries, low = tl.zeros([1], tl.int64), tl.zeros([1], tl.int64)
    wrong = tl.zeros([1], tl.int32)
    for at in range(0, num, SEGMENTS):
        lane = at + tl.arange(0, SEGMENTS)
        there = lane < num
        n = tl.load(sizes + lane, mask=there, other=0)
        k = _word(wire + 4 * lane, there).to(tl.int64) & 0xFFFFFFFF
        wrong |= tl.max((k > n).to(tl.int32), 0)
        k = tl.minimum(k, n)
        r = _parameter(k, n)
        lows = (k * r + 7) >> 3
        row = rows + lane * COLUMNS
        tl.store(row, k.to(tl.int32), mask=there)
        tl.store(row + 1, (entries + tl.cumsum(k, 0) - k).to(tl.int32), mask=there)
        tl.store(row + 2, r.to(tl.int32), mask=there)
        tl.store(row + 3, (low + tl.cumsum(lows, 0) - lows).to(tl.int32), mask=there)
        entries += tl.sum(k, 0)
        low += tl.sum(lows, 0)
    head = 4 * (num + 1).to(tl.int64)
    nbytes = _word(wire + 4 * num + one, one == 0).to(tl.int64) & 0xFFFFFFFF
    wrong |= ((nbytes < low) | (head + nbytes + 4 * entries != length)).to(tl.int32)
    tl.store(facts + message * FACTS + one, tl.where(wrong > 0, 0, entries))
    tl.store(facts + message * FACTS + 1 + one, tl.where(wrong > 0, 0, nbytes))
    left = tl.sum(tl.where(wrong > 0, 0, nbytes - low), 0).to(tl.int32)
    wanted = tl.sum(tl.where(wrong > 0, 0, entries), 0).to(tl.int32)
    unary = wire + tl.sum(tl.where(wrong > 0, 0, head + low), 0)
    ends += room
    found = tl.zeros([], tl.int32)
    for at in range(0, left, BITS // 8):
        bit = 8 * at + tl.arange(0, BITS)
        byte = tl.load(unary + (bit >> 3), mask=bit < 8 * left, other=0).to(tl.int32)
        ones = (byte >> (bit & 7)) & 1
        rank = found + tl.cumsum(ones, 0) - 1
        tl.store(ends + rank, bit, mask=(ones > 0) & (rank < wanted))
        found += tl.sum(ones, 0)
    last = tl.load(unary + left - 1, mask=left > 0, other=1)
    bad = (found != wanted) | (last == 0)
    tl.store(flags + message + one, tl.where(wrong > 0, 1, bad.to(tl.int32)))


@triton.jit(do_not_specialize=["num", "messages", "rooms"], do_not_specialize_on_alignment=["base"])
def places_kernel(base, where, sizes, num, messages, rooms, rows, facts, flags, ends, ENTRIES: tl.constexpr):
    """Store the indices of a segment of a message, and set the message's flag where they are not valid."""
    message, segment = tl.program_id(0), tl.program_id(1)
    wire = base + tl.load(where + message)
    room = tl.load(where + 2 * messages + message)
    row = rows + (message.to(tl.int64) * num + segment) * COLUMNS
    k = tl.where(tl.load(flags + message) == 0, tl.load(row), 0)
    first, r = tl.load(row + 1).to(tl.int64), tl.load(row + 2).to(tl.int64)
    head = 4 * (num + 1).to(tl.int64)
    low = wire + head + tl.load(row + 3)
    values = wire + head + tl.load(facts + message * FACTS + 1) + 4 * first
    used = (k * r + 7) >> 3
    n = tl.load(sizes + segment)
    rest = tl.load(low + used - 1, mask=used > 0, other=0).to(tl.int32)
    wrong = ((k * r & 7) > 0) & ((rest >> (k * r & 7).to(tl.int32)) > 0)
    wrong = wrong.to(tl.int32)
    done = tl.zeros([], tl.int64)
    for at in range(0, k, ENTRIES):
        lane = at + tl.arange(0, ENTRIES)
        there = lane < k
        entry = ends + room + first + lane
        end = tl.load(entry, mask=there, other=0)
        before = tl.load(entry - 1, mask=there & (first + lane > 0), other=-1)
        q = (end - before - 1).to(tl.int64)
        bit = lane * r
        byte = bit >> 3
        raw = tl.load(low + byte, mask=there & (byte < used), other=0).to(tl.int64)
        for i in tl.static_range(1, 5):
            raw |= tl.load(low + byte + i, mask=there & (byte + i < used), other=0).to(tl.int64) << 8 * i
        part = (raw >> (bit & 7)) & ((1 << r) - 1)
        far = q > (n >> r)
        step = tl.where(there & (far == 0), (q << r) + part + 1, 0)
        index = done + tl.cumsum(step, 0) - 1
        done += tl.sum(step, 0)
        bits = _word(values + 4 * lane, there)
        bad = far | (index >= n) | ((bits & INFINITE) == INFINITE)
        wrong |= tl.max((there & bad).to(tl.int32), 0)
        tl.store(ends + rooms + room + first + lane, index.to(tl.int32), mask=there)
    tl.atomic_or(flags + message, 1, mask=wrong > 0)


@triton.jit(do_not_specialize=["num", "messages", "rooms"], do_not_specialize_on_alignment=["base"])
def add_kernel(
    base,
    where,
    starts,
    num,
    messages,
    rooms,
    rows,
    facts,
    flags,
    ends,
    out,
    alpha,
    MESSAGES: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Add a segment's entries of all messages in order; nothing where a message is not valid."""
    segment = tl.program_id(0)
    out += tl.load(starts + segment)
    each = tl.arange(0, MESSAGES)
    wrong = tl.max(tl.load(flags + each, mask=each < messages, other=0), 0)
    head = 4 * (num + 1).to(tl.int64)
    for message in range(0, tl.where(wrong == 0, messages, 0)):
        row = rows + (message * num + segment) * COLUMNS
        k, first = tl.load(row), tl.load(row + 1).to(tl.int64)
        wire = base + tl.load(where + message)
        values = wire + head + tl.load(facts + message * FACTS + 1) + 4 * first
        room = tl.load(where + 2 * messages + message)
        for at in range(0, k, ENTRIES):
            lane = at + tl.arange(0, ENTRIES)
            there = lane < k
            index = tl.load(ends + rooms + room + first + lane, mask=there, other=0)
            value = _word(values + 4 * lane, there).to(tl.float32, bitcast=True)
            old = tl.load(out + index, mask=there, other=0.0)
            tl.store(out + index, old + value * alpha, mask=there)
        tl.debug_barrier()  # the next message may have the same entry, in another thread


def encode(
    x: Tensor, segments: Segments, indices: Tensor, counts: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Encode entries as a message.

    Args:
        x: the flat buffer.
        segments: the ranges of x.
        indices: int32, one segment's after the other, perhaps with more behind them.
        counts: of each segment, int64 (s,) on the device of x.
        most: the most bytes that the message can take.

    Returns:
        The message uint8 and values float32 and positions int64 of the entries, all with room behind them;
        and facts int64 (2,): the bytes of the message's positions, and 1 if indices do not ascend. Then the
        rest means nothing.
    """
    device, num, total = x.device, len(segments), indices.numel()
    words = torch.zeros(most // 4 + 2, dtype=torch.int32, device=device)
    pair = num + num % 2  # keeps the parts aligned to 16 bytes
    highs, facts, places = torch.empty(pair + 2 + total, dtype=torch.int64, device=device).split_with_sizes(
        [pair, 2, total]
    )
    chosen = torch.empty(total, dtype=torch.float32, device=device)
    sizes, starts = table(segments.sizes, device), table(segments.starts, device)
    ranges = (indices, counts, sizes)
    with dispatch.device_of(x):
        launch(measure_kernel, (num,), *ranges, highs, num, SEGMENTS, ENTRIES, num_warps=4)
        made = (words, facts, chosen, places, SEGMENTS, ENTRIES)
        launch(write_kernel, (num,), x, *ranges, starts, highs, num, *made)
    return words.view(torch.uint8), chosen, places, facts


def add_(wires: Sequence[Tensor], segments: Segments, out: Tensor, alpha: float) -> Tensor:
    """Add alpha times N messages to out, in order, unless one is damaged. Return flags int32 (N,) of those.

    Each message is at least as long as its head, and all together are shorter than 2^28 bytes.
    """
    device, num, messages = out.device, len(segments), len(wires)
    base, head = wires[0], 4 * (len(segments) + 1)
    first = base.data_ptr()
    where = np.empty((3, messages), dtype=np.int64)
    rooms = 0
    for i, wire in enumerate(wires):
        length = wire.numel()
        where[:, i] = wire.data_ptr() - first, length, rooms
        rooms += (length - head) >> 2
    of_messages = uploaded(where.reshape(-1), device)
    parts = [messages * num * 4, messages + -messages % 4, 2 * rooms]  # aligned to 16 bytes
    scratch = torch.empty(sum(parts), dtype=torch.int32, device=device)
    rows, flags, ends = scratch.split_with_sizes(parts)
    facts = torch.empty(2 * messages, dtype=torch.int64, device=device)
    sizes, starts = table(segments.sizes, device), table(segments.starts, device)
    shared = num, messages, rooms, rows, facts, flags, ends
    with dispatch.device_of(out):
        launch(ones_kernel, (messages,), base, of_messages, sizes, *shared, SEGMENTS, BITS)
        launch(places_kernel, (messages, num), base, of_messages, sizes, *shared, ENTRIES, num_warps=4)
        launch(
            add_kernel,
            (num,),
            base,
            of_messages,
            starts,
            *shared,
            out,
            alpha,
            triton.next_power_of_2(messages),
            ENTRIES,
            num_warps=4,
        )
    return flags[:messages]
