# mypy: disable-error-code="no-untyped-def, untyped-decorator, unused-ignore"
"""Kernels that decode sparse messages and add them in order."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped]
import triton.language as tl  # type: ignore[import-not-found,import-untyped]

from laconic.kernels.entropy.triton_rice import rice_parameter

COLUMNS = tl.constexpr(4)  # count, first entry, Rice parameter, start of low bits
FACTS = tl.constexpr(2)  # entries, bytes of positions
INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def word(at, mask):
    value = tl.load(at, mask=mask, other=0).to(tl.int32)
    value |= tl.load(at + 1, mask=mask, other=0).to(tl.int32) << 8
    value |= tl.load(at + 2, mask=mask, other=0).to(tl.int32) << 16
    return value | (tl.load(at + 3, mask=mask, other=0).to(tl.int32) << 24)


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
    """Read a header, and store where the unary part has ones."""
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
        k = word(wire + 4 * lane, there).to(tl.int64) & 0xFFFFFFFF
        wrong |= tl.max((k > n).to(tl.int32), 0)
        k = tl.minimum(k, n)
        r = rice_parameter(k, n)
        lows = (k * r + 7) >> 3
        row = rows + lane * COLUMNS
        tl.store(row, k.to(tl.int32), mask=there)
        tl.store(row + 1, (entries + tl.cumsum(k, 0) - k).to(tl.int32), mask=there)
        tl.store(row + 2, r.to(tl.int32), mask=there)
        tl.store(row + 3, (low + tl.cumsum(lows, 0) - lows).to(tl.int32), mask=there)
        entries += tl.sum(k, 0)
        low += tl.sum(lows, 0)
    head = 4 * (num + 1).to(tl.int64)
    nbytes = word(wire + 4 * num + one, one == 0).to(tl.int64) & 0xFFFFFFFF
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
    """Store a segment's indices; set a flag if any is invalid."""
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
        bits = word(values + 4 * lane, there)
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
            value = word(values + 4 * lane, there).to(tl.float32, bitcast=True)
            old = tl.load(out + index, mask=there, other=0.0)
            tl.store(out + index, old + value * alpha, mask=there)
        tl.debug_barrier()  # another thread may have the entry in the next message
