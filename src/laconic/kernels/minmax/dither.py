"""Random rounding of a grid, by `dither24` of each tensor's key."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.core.framing import sent_to
from laconic.core.turn import MASK
from laconic.kernels.checks import keys64
from laconic.kernels.minmax.rows import GROUP, Rows
from laconic.kernels.philox.reference import LOW, LOWER_KEY, MULTIPLIERS, ROUNDS, WEYL
from laconic.kernels.tiles import table

UPPER, LOWER = GROUP // 2, GROUP  # elements per counter: upper 16 or lower 8 bits


def rounded_up(y: Tensor, rows: Rows, keys: Sequence[int]) -> Tensor:
    """Round a grid to levels uint8 at random, without bias."""
    levels = y.to(torch.uint8)
    threshold = (y - levels).mul_(2.0**24).to(torch.int32)
    upper = _cut(_words(rows, keys, UPPER, y.device), torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    if not y.is_cpu:
        others = [key ^ LOWER_KEY for key in keys]
        lower = _cut(_words(rows, others, LOWER, y.device), torch.uint8)
        return levels.add_(upper.mul_(256).add_(lower) < threshold)
    most = threshold >> 8
    levels.add_(upper < most)
    ties = (upper == most).nonzero().flatten()
    if len(ties):
        levels[ties] += _lower(ties, rows, keys) < threshold[ties] & 255
    return levels


def _words(rows: Rows, keys: Sequence[int], each: int, device: torch.device) -> tuple[Tensor, ...]:
    total = rows.numel // each
    place = torch.arange(total, dtype=torch.int64, device=device)
    if len(keys) == 1:
        return _philox(place, _schedule(keys, device))
    counts = tuple(rows.length * count // each for count in rows.rows)
    firsts = tuple(rows.length * first // each for first in rows.firsts)
    numbers = torch.arange(len(counts), dtype=torch.int64, device=device)
    owners = numbers.repeat_interleave(table(counts, device), output_size=total)
    return _philox(place.sub_(table(firsts, device)[owners]), _schedule(keys, device), owners)


def _schedule(keys: Sequence[int], device: torch.device) -> Tensor:
    key = sent_to(keys64([key & MASK for key in keys], len(keys)), device)
    steps = table(tuple(i * weyl for i in range(ROUNDS) for weyl in WEYL), device).view(ROUNDS, 2, 1)
    return torch.stack([key & LOW, (key >> 32) & LOW]).add(steps).bitwise_and_(LOW)


def _philox(counter: Tensor, schedule: Tensor, owners: Tensor | None = None) -> tuple[Tensor, ...]:
    c0, c1 = counter & LOW, (counter >> 32) & LOW
    c2 = c3 = torch.zeros_like(counter)
    for step in schedule:
        k0, k1 = step if owners is None else step.index_select(1, owners)
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # the sign wraps, the 64 bits are right
        c0 = (p1 >> 32).bitwise_and_(LOW).bitwise_xor_(c1).bitwise_xor_(k0)
        c2 = (p0 >> 32).bitwise_and_(LOW).bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = p1.bitwise_and_(LOW), p0.bitwise_and_(LOW)
    return c0, c1, c2, c3


def _cut(words: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    whole = torch.stack(words, dim=1).view(dtype).view(-1, 4, 8 // dtype.itemsize)
    return whole[:, :, : 4 // dtype.itemsize].reshape(-1)


def _lower(places: Tensor, rows: Rows, keys: Sequence[int]) -> Tensor:
    owners = rows.owners(places.device)[places // rows.length]
    i = places - rows.length * table(rows.firsts, places.device)[owners]
    schedule = _schedule([key ^ LOWER_KEY for key in keys], places.device)
    words = torch.stack(_philox(i // LOWER, schedule, owners))
    return words.gather(0, (i % LOWER // 4)[None])[0] >> 8 * (i % 4) & 255
