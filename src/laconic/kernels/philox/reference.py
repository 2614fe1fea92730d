"""Philox4x32-10 in torch integers (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from laconic.core.framing import sent_to

CPU = torch.device("cpu")
LOW = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOWER_KEY = 0xD1B54A32D192ED03  # stream that breaks ties
CHUNK = 1 << 15  # counters that fit in a CPU's cache
DEVICE_CHUNK = 1 << 22  # counters at a time elsewhere: 300 MB
SMALL = 1 << 12  # counters of a run generated together with others

Key = tuple[int, int] | tuple[Tensor, Tensor]  # low and high word
Run = tuple[int, int, int]  # key, first counter, number of counters


def block(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: Key) -> tuple[Tensor, ...]:
    return tuple(word & LOW for word in _rounds(*counter, *key))


def _rounds(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: int | Tensor, k1: int | Tensor
) -> tuple[Tensor, ...]:
    """Return the words in the low halves of int64; one mask after the xor is enough."""
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # the sign wraps, the 64 bits are right
        c0 = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(LOW)
        c2 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(LOW)
        c1, c3 = p1, p0
        k0, k1 = k0 + WEYL[0] & LOW, k1 + WEYL[1] & LOW
    return c0, c1, c2, c3


def _fill_(out: Tensor, low: Tensor, high: Tensor, key: Key) -> None:
    zero = torch.zeros_like(low)
    for i, word in enumerate(_rounds(low, high, zero, zero, *key)):
        out[:, i] = word.view(torch.int32)[::2]


def _ranges(n: int, device: torch.device) -> Iterator[tuple[int, int]]:
    chunk = CHUNK if device.type == "cpu" else DEVICE_CHUNK
    return ((at, min(at + chunk, n)) for at in range(0, n, chunk))


def blocks(key: int, first: int, count: int, device: torch.device = CPU) -> Tensor:
    out = torch.empty(count, 4, dtype=torch.int32, device=device)
    halves = (key & LOW, key >> 32 & LOW)
    for begin, end in _ranges(count, device):
        counter = torch.arange(first + begin, first + end, dtype=torch.int64, device=device)
        high = counter >> 32 if first + end > LOW else torch.zeros_like(counter)
        _fill_(out[begin:end], counter & LOW, high, halves)
    return out.view(-1)


def streams(runs: Sequence[Run], device: torch.device = CPU) -> Tensor:
    if all(count <= SMALL for _, _, count in runs):
        return blocks(*runs[0], device) if len(runs) == 1 else _small_streams(runs, device)
    parts, at = [], 0
    while at < len(runs):
        end = at + 1
        while end < len(runs) and runs[at][2] <= SMALL and runs[end][2] <= SMALL:
            end += 1
        parts.append(blocks(*runs[at], device) if end == at + 1 else _small_streams(runs[at:end], device))
        at = end
    return torch.cat(parts)


def _small_streams(runs: Sequence[Run], device: torch.device) -> Tensor:
    counts = tuple(count for _, _, count in runs)
    total = sum(counts)
    out = torch.empty(total, 4, dtype=torch.int32, device=device)
    lengths, starts = _tables(counts, device or torch.device("cpu"))
    rows = [(key & LOW, key >> 32 & LOW, first) for key, first, _ in runs]
    low, high, first = sent_to(
        torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 3), device
    ).T.contiguous()
    owner = torch.repeat_interleave(lengths, output_size=total)
    for begin, end in _ranges(total, device):
        mine = owner[begin:end]
        counter = torch.arange(begin, end, dtype=torch.int64, device=device) + (first - starts)[mine]
        _fill_(out[begin:end], counter & LOW, counter >> 32, (low[mine], high[mine]))
    return out.view(-1)


@lru_cache(maxsize=512)
def _tables(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor(counts, dtype=torch.int64, device="cpu")
    return lengths.to(device), (lengths.cumsum(0) - lengths).to(device)


def without_padding(x: Tensor, sizes: Sequence[int], multiple: int) -> Tensor:
    """Remove the padding of each run up to a multiple."""
    if len(sizes) == 1:
        return x[: sizes[0]]
    if not any(size % multiple for size in sizes):
        return x
    runs = [part for size in sizes for part in (size, -size % multiple)]
    return torch.cat(torch.split(x, runs)[::2])


def words(key: int, n: int, offset: int = 0, device: torch.device = CPU) -> Tensor:
    return philox(key, n, offset, device).to(torch.int64) & LOW


def philox(key: int, n: int, offset: int = 0, device: torch.device = CPU) -> Tensor:
    first = offset // 4
    stream = blocks(key, first, (offset + n + 3) // 4 - first, device)
    return stream[offset - 4 * first :][:n]


def uniform(key: int, n: int, offset: int = 0, device: torch.device = CPU) -> Tensor:
    return (philox(key, n, offset, device) >> 8 & 0xFFFFFF).to(torch.float32).mul_(2.0**-24)


def dither24(key: int, n: int, offset: int = 0, device: torch.device = CPU) -> Tensor:
    """Join half a word of one stream and a byte of another per element."""
    halves, quarters = offset // 8, offset // 16
    first, second = (offset + n + 7) // 8 - halves, (offset + n + 15) // 16 - quarters
    drawn = streams([(key, halves, first), (key ^ LOWER_KEY, quarters, second)], device)
    upper = drawn[: 4 * first].view(torch.int16)[offset - 8 * halves :][:n]
    return _joined(upper, drawn[4 * first :].view(torch.uint8)[offset - 16 * quarters :][:n])


def dithers24(keys: Sequence[int], sizes: Sequence[int], device: torch.device = CPU) -> Tensor:
    if len(keys) == 1:
        return dither24(keys[0], sizes[0], 0, device)
    upper = [(key, 0, (n + 7) // 8) for key, n in zip(keys, sizes, strict=True)]
    lower = [(key ^ LOWER_KEY, 0, (n + 15) // 16) for key, n in zip(keys, sizes, strict=True)]
    drawn, middle = streams(upper + lower, device), 4 * sum(count for _, _, count in upper)
    return _joined(
        without_padding(drawn[:middle].view(torch.int16), sizes, 8),
        without_padding(drawn[middle:].view(torch.uint8), sizes, 16),
    )


def _joined(upper: Tensor, lower: Tensor) -> Tensor:
    return (upper.to(torch.int32).bitwise_and_(0xFFFF) << 8).bitwise_or_(lower)
