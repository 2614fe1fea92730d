"""Norms of all blocks in plain torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from laconic.core.layout import Segments
from laconic.kernels.quantise.form import Form, Measure
from laconic.kernels.quantise.places import chunks, owners, places

LARGEST = torch.finfo(torch.float32).max
ROW = 128  # elements in a long block
LONGEST_ROW = 2048  # longest block that is one row

Fold = Callable[[Tensor], Tensor]  # rows (r, w) to (r,)


def norms(x: Tensor, segments: Segments, form: Form, measure: Measure) -> Tensor:
    blocks = blocks_of(x, segments, form)
    if not blocks.lengths:
        return x.new_empty(0)
    if measure.norm == "max":
        largest = reduced(blocks, lambda rows: largest_of(rows.view(torch.int32) & 0x7FFFFFFF), largest_of)
        return limited(blocks, largest.view(torch.float32), measure.clip)
    if measure.norm == "l2":
        return finished(reduced(blocks, lambda rows: sum_of(rows.double().square_()), sum_of).sqrt())
    return finished(reduced(blocks, lambda rows: sum_of(rows.double().abs_()), sum_of) / blocks.sizes)


def finished(value: Tensor) -> Tensor:
    """Round float64 to float32, clamped to its range; NaN if not finite."""
    return torch.where(torch.isfinite(value), value.clamp(max=LARGEST), torch.nan).to(torch.float32)


def limited(blocks: Runs, largest: Tensor, clip: float) -> Tensor:
    if not clip:
        return largest
    first = blocks.values[blocks.starts]
    about = Runs(blocks.values, blocks.starts, blocks.sizes, blocks.lengths, blocks.dense, first)
    both = reduced(about, sum_and_square, sum_of)
    return limited_by(first, blocks.sizes, largest, both.real, both.imag, clip)


def limited_by(
    first: Tensor, sizes: Tensor, largest: Tensor, total: Tensor, square: Tensor, clip: float
) -> Tensor:
    """Limit the largest to `clip` population standard deviations, or the root mean square if more.

    total, square: float64 sums of x - first and of its square.
    """
    variance = ((square - total.square() / sizes) / sizes).clamp(min=0)
    mean = first.double() + total / sizes
    deviation, size = (each.sqrt().clamp(max=LARGEST).float() for each in (variance, variance + mean**2))
    limit = torch.maximum(clip * deviation, size)
    return torch.where((limit > 0) & (limit < largest), limit, largest)


def largest_of(rows: Tensor) -> Tensor:
    return rows.amax(dim=1)


def sum_of(rows: Tensor) -> Tensor:
    return rows.sum(dim=1)


def sum_and_square(rows: Tensor) -> Tensor:
    """Return both sums as one complex number."""
    return torch.complex(rows.sum(dim=1), rows.square().sum(dim=1))


@dataclass(frozen=True)
class Runs:
    """Runs of values (n,), with `starts` and `sizes` int64 (B,).

    lengths: number of runs of each length. dense: start of the first, if runs are adjacent and only the last
    is shorter. shift (B,): subtracted from a run's values, in float64.
    """

    values: Tensor
    starts: Tensor
    sizes: Tensor
    lengths: Counter[int]
    dense: int | None = None
    shift: Tensor | None = None


def blocks_of(x: Tensor, segments: Segments, form: Form) -> Runs:
    at = places(segments, form, x.device)
    lengths: Counter[int] = Counter()
    for n in segments.sizes:
        if n:
            whole, rest = divmod(n, form.block or n)
            lengths[form.block or n] += whole
            lengths[rest] += 1
    lengths = Counter({length: times for length, times in lengths.items() if length and times})
    of = owners(at.first_block, at.block_counts, 0, at.blocks)
    inside = torch.zeros_like(of)
    if form.block:
        inside = torch.arange(at.blocks, dtype=torch.int64, device=x.device) - at.first_block[of]
        inside *= form.block
    sizes = at.sizes[of] - inside
    if form.block:
        sizes.clamp_(max=form.block)
    dense = segments.starts[0] if len(segments) == 1 else None
    return Runs(x, at.starts[of] + inside, sizes, lengths, dense)


def reduced(runs: Runs, first: Fold, then: Fold) -> Tensor:
    """Fold rows of values with `first`, then the results with `then`: (B,)."""
    longest = max(runs.lengths)
    width = longest if longest <= LONGEST_ROW else ROW
    parts = [first(rows) for rows in rows_of(runs, width)]
    made = torch.cat(parts) if len(parts) > 1 else parts[0]
    if longest <= width:
        return made
    counts = rows_in(runs.sizes, width)
    lengths: Counter[int] = Counter()
    for length, times in runs.lengths.items():
        lengths[-(-length // width)] += times
    return reduced(Runs(made, counts.cumsum(0) - counts, counts, lengths), then, then)


def rows_in(sizes: Tensor, width: int) -> Tensor:
    return (sizes + (width - 1)) // width


def rows_of(runs: Runs, width: int) -> Iterator[Tensor]:
    """Yield rows (r, width) in chunks; a run's last row is zero-padded."""
    values, device = runs.values, runs.values.device
    longest, total = max(runs.lengths), sum(times * -(-n // width) for n, times in runs.lengths.items())
    counts = rows_in(runs.sizes, width)
    before = counts.cumsum(0) - counts
    columns = torch.arange(width, dtype=torch.int64, device=device)
    aligned = longest % width == 0 or sum(runs.lengths.values()) == 1
    dense = runs.dense if aligned else None
    alone = sum(runs.lengths.values()) == 1
    for begin, end in chunks(total, width, device):
        numbers = torch.arange(begin, end, dtype=torch.int64, device=device)
        of = numbers if longest <= width else owners(before, counts, begin, end)
        shift = None if runs.shift is None else runs.shift[of, None]
        if dense is not None and (alone or shift is None):
            last = dense + sum(n * times for n, times in runs.lengths.items())
            flat = values[dense + begin * width : min(dense + end * width, last)]
            if runs.shift is not None:
                flat = flat.double() - runs.shift
            yield pad(flat, (0, (end - begin) * width - flat.numel())).view(-1, width)
            continue
        at = ((numbers - before[of]) * width)[:, None] + columns
        inside = at < runs.sizes[of, None]
        at += runs.starts[of, None]
        rows = values.take(at * inside)
        if shift is not None:
            rows = rows.double() - shift
        yield torch.where(inside, rows, torch.zeros((), dtype=rows.dtype, device=device))
