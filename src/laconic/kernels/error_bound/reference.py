"""Error-bounded floats in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from laconic.core.errors import WireError
from laconic.kernels.bitpack.reference import pack_bits, unpack_bits
from laconic.kernels.error_bound.form import (
    BLOCK,
    HEAD,
    LEAST,
    MARKED,
    MOST,
    PLAIN,
    RAW,
    TAGGED,
    TOP,
    ZERO,
    blocks,
    not_finite,
    step_of,
)

BYTES = BLOCK // 8
TAGS = 2 * BYTES // 8  # flag bytes: mixed marks, then full ones


def encode(x: Tensor, bound: Tensor, floor: int) -> Tensor:
    """Return head, headers, tags, marks, low bits, unary bits, raw floats."""
    if not bool(torch.isfinite(x).all()):
        raise not_finite()
    n, device = x.numel(), x.device
    rows = pad(x, (0, -n % BLOCK)).view(-1, BLOCK)
    count = _sizes(n, device)
    q, fits = bins(rows, bound)
    marks = q > 0 if floor else rows != 0
    negative = ((rows < 0) & marks).long()
    below = negative.amax(1) if len(rows) else count
    every = (q << below[:, None]) - negative if floor else (q << below[:, None]) + negative
    some = (q - floor << below[:, None]) + negative
    c = marks.sum(1)
    k_plain, k_marked = rice(every.sum(1), count), rice(torch.where(marks, some, 0).sum(1), c)
    plain = (count - c) * (1 + k_plain) <= count if floor else c == count
    k = torch.where(plain, k_plain, k_marked)
    written = torch.where(
        plain[:, None], torch.arange(BLOCK, device=device, dtype=torch.int64) < count[:, None], marks
    )
    symbols = torch.where(plain[:, None], every, some)
    bits = pack_bits(marks.flatten(), 1).view(-1, BYTES)
    mixed = (bits != 0) & (bits != 255)
    tagged = TAGS + mixed.sum(1) < BYTES
    low_nbytes = (k * written.sum(1) + 7) // 8
    unary = torch.where(written, (symbols >> k[:, None]) + 1, 0).sum(1)
    marks_nbytes = torch.where(plain, 0, torch.where(tagged, TAGS + mixed.sum(1), BYTES))
    raw = ~fits | (8 * (marks_nbytes + low_nbytes) + unary >= 32 * count)
    mode = torch.where(plain, PLAIN, torch.where(tagged, TAGGED, MARKED))
    mode = torch.where(raw, RAW, torch.where(c == 0, ZERO, mode))
    coded = (mode != RAW) & (mode != ZERO)
    headers = torch.where(coded, k + 16 * below, 0) + 32 * mode
    has_tags, has_marks = mode == TAGGED, (mode == TAGGED) | (mode == MARKED)
    tags = torch.cat([_packed(mixed), _packed(bits == 255)], dim=1)[has_tags]
    kept_bytes = bits[has_marks[:, None] & (mixed | ~has_tags[:, None])]
    chosen = written & coded[:, None]
    wide = k[:, None].expand(-1, BLOCK)[chosen]
    low = _low_bytes(symbols[chosen], wide, low_nbytes * coded, chosen)
    high = symbols[chosen] >> wide
    floats = x[raw.repeat_interleave(count)].view(torch.uint8)
    head = torch.cat(
        [bound.view(1).view(torch.uint8), torch.tensor([floor], device=device, dtype=torch.int64).byte()]
    )
    return torch.cat([head, headers.byte(), tags.flatten(), kept_bytes, low, _unary_bytes(high), floats])


def decode(wire: Tensor, n: int) -> tuple[Tensor, Tensor]:
    floor = check_size(wire, n)
    device, count = wire.device, _sizes(n, wire.device)
    wire_bound = wire[:4].clone().view(torch.float32)[0]
    step, _ = step_of(wire_bound)
    headers, rest = wire[HEAD : HEAD + blocks(n)].long(), wire[HEAD + blocks(n) :]
    mode, signed, k = headers >> 5, headers >> 4 & 1, headers & 15
    raw, plain = mode == RAW, mode == PLAIN
    if bool((mode > RAW).any() | ((raw | (mode == ZERO)) & (headers & 31 > 0)).any()):
        raise WireError("a header says what no block is")
    marks, rest = _marks(rest, mode)
    inside = torch.arange(BLOCK, device=device, dtype=torch.int64) < count[:, None]
    marks = torch.where(plain[:, None], inside, marks)
    if bool((marks & ~inside).any()):
        raise WireError("a mark lies behind the last element")
    c = marks.sum(1)
    low_nbytes = (k * c + 7) // 8
    unary_nbytes = rest.numel() - int(low_nbytes.sum()) - 4 * int(count[raw].sum())
    if unary_nbytes < 0:
        raise WireError("the wire ends before its last section")
    low_end, exact_start = int(low_nbytes.sum()), int(low_nbytes.sum()) + unary_nbytes
    low, unary, floats = rest[:low_end], rest[low_end:exact_start], rest[exact_start:]
    wide = k[:, None].expand(-1, BLOCK)[marks]
    high = _high(unary, wide.numel())
    if bool((high >= 65536 >> wide).any()):
        raise WireError("a bin's number is too large")
    symbols = torch.zeros(marks.shape, dtype=torch.int64, device=device)
    symbols[marks] = (high << wide) + _low(low, wide, k, c, low_nbytes, marks)
    sign = symbols & signed[:, None]
    whole = plain[:, None] & bool(floor)  # 0, -1, 1, -2, 2
    q = torch.where(whole, symbols + sign, symbols) >> signed[:, None]
    q += (marks & ~whole & bool(floor)).long()
    size = torch.where(marks & (q == 0) & (not floor), wire_bound / 2, q.float() * step)
    values = (size * (1 - 2 * sign).float()).flatten()[:n]
    exact = floats.clone().view(torch.float32)
    if not bool(torch.isfinite(exact).all()):
        raise WireError("a raw float is not finite")
    where = raw.repeat_interleave(count)
    values[where] = exact
    support = marks.flatten()[:n].clone()
    support[where] = exact != 0
    return values, support


def bins(rows: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Return unsigned bin numbers, and whether each block keeps the bound."""
    step, inverse = step_of(bound)
    size = rows.abs()
    q = ((size * inverse).clamp(max=65536.0) + 0.5).long()
    q = torch.where(size <= bound, 0, q)
    return q, (((q.float() * step - size).abs() <= bound) & (q <= TOP)).all(1)


def rice(total: Tensor, count: Tensor) -> Tensor:
    """Return the low bits per symbol: the largest k <= 15 with 2 count 2^k <= 2 total + count."""
    powers = torch.arange(1, 16, device=total.device, dtype=torch.int64)
    return (2 * count[:, None] << powers <= (2 * total + count)[:, None]).sum(1) * (count > 0)


def check_size(wire: Tensor, n: int) -> int:
    """Check length and head; return what marks mean: 0 zeros, 1 bins."""
    if wire.numel() < HEAD + blocks(n):
        raise WireError(f"{n} elements take {HEAD + blocks(n)} bytes or more, got {wire.numel()}")
    bound = float(wire[:4].clone().view(torch.float32))
    if not LEAST <= bound <= MOST or int(wire[4]) > 1:
        raise WireError("the head holds no error bound that an encoder takes")
    return int(wire[4])


def check_support(wire: Tensor, n: int) -> None:
    if check_size(wire, n):
        raise WireError("this wire marks bins: encode with marks='zeros' to read which elements were 0")


def _sizes(n: int, device: torch.device) -> Tensor:
    sizes = torch.full((blocks(n),), BLOCK, device=device, dtype=torch.int64)
    if n % BLOCK:
        sizes[-1] = n % BLOCK
    return sizes


def _packed(flags: Tensor) -> Tensor:
    return pack_bits(flags.flatten(), 1).view(-1, BYTES // 8)


def _places(each: Tensor, nbytes: Tensor, chosen: Tensor) -> Tensor:
    """Return each chosen symbol's first bit; blocks start on whole bytes."""
    starts = 8 * (torch.cumsum(nbytes, 0) - nbytes)
    rank = torch.cumsum(chosen, 1) - 1
    return (starts[:, None] + rank * each)[chosen]


def _low_bytes(symbols: Tensor, wide: Tensor, nbytes: Tensor, chosen: Tensor) -> Tensor:
    each = torch.zeros(chosen.shape, dtype=torch.int64, device=symbols.device)
    each[chosen] = wide
    at = _places(each.amax(1, keepdim=True), nbytes, chosen) if len(nbytes) else wide
    shifted = (symbols & (1 << wide) - 1) << (at & 7)
    out = torch.zeros(int(nbytes.sum()) + 2, dtype=torch.int64, device=symbols.device)
    for byte in range(3):  # at most 7 + 15 bits
        out.index_add_(0, ((at >> 3) + byte).clamp(max=out.numel() - 1), shifted >> 8 * byte & 255)
    return out[:-2].byte()


def _low(low: Tensor, wide: Tensor, k: Tensor, c: Tensor, nbytes: Tensor, marks: Tensor) -> Tensor:
    at = _places(k[:, None], nbytes, marks)
    data = pad(low.long(), (0, 2))
    ends = torch.cumsum(nbytes, 0)[k * c % 8 > 0] - 1
    if bool((data[ends] >> (k * c)[k * c % 8 > 0] % 8 > 0).any()):
        raise WireError("the bits after the low bits of a block must be zero")
    byte = (at >> 3).clamp(max=low.numel())  # a symbol without low bits may be last
    word = sum(
        (data[(byte + i).clamp(max=data.numel() - 1)] << 8 * i for i in range(3)), torch.zeros_like(at)
    )
    return word >> (at & 7) & (1 << wide) - 1


def _unary_bytes(high: Tensor) -> Tensor:
    ones = torch.cumsum(high + 1, 0) - 1
    out = torch.zeros(int(ones[-1]) // 8 + 1 if len(ones) else 0, dtype=torch.int64, device=high.device)
    return out.index_add_(0, ones >> 3, 1 << (ones & 7)).byte()


def _high(unary: Tensor, symbols: int) -> Tensor:
    ones = unpack_bits(unary, 1, 8 * unary.numel()).nonzero().flatten()
    if ones.numel() != symbols or (unary.numel() and int(unary[-1]) == 0):
        raise WireError(f"the unary section must hold {symbols} ones and end there, got {ones.numel()}")
    return torch.diff(ones, prepend=ones.new_full((1,), -1)) - 1


def _marks(rest: Tensor, mode: Tensor) -> tuple[Tensor, Tensor]:
    """Return the marks of the blocks that have them, and the rest of the wire."""
    has_tags, has_marks = mode == TAGGED, (mode == TAGGED) | (mode == MARKED)
    tagged = int(has_tags.sum())
    if rest.numel() < TAGS * tagged:
        raise WireError("the wire ends inside the tags")
    tags, rest = rest[: TAGS * tagged].view(-1, 2, TAGS // 2), rest[TAGS * tagged :]
    bits = unpack_bits(tags.flatten(), 1, 8 * tags.numel()).view(-1, 2, BYTES) > 0
    mixed = has_marks[:, None].expand(-1, BYTES).clone()
    mixed[has_tags] = bits[:, 0]
    every = torch.zeros(mixed.shape, dtype=torch.uint8, device=rest.device)
    every[has_tags] = 255 * bits[:, 1].byte()
    stored = int(mixed.sum())
    if rest.numel() < stored:
        raise WireError("the wire ends inside the marks")
    every[mixed] = rest[:stored]
    literal = every[has_tags][bits[:, 0]]
    if bool((bits[:, 0] & bits[:, 1]).any() | (literal == 0).any() | (literal == 255).any()):
        raise WireError("a byte of marks has the wrong tag")
    return unpack_bits(every.flatten(), 1, 8 * every.numel()).view(-1, BLOCK) > 0, rest[stored:]
