"""Min-max quantisation in plain torch.

Tensors of one width share a grid (see `rows`). On a GPU a damaged message sets a flag and adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from laconic.core.deferred import check
from laconic.core.errors import NonFiniteError
from laconic.core.layout import Segments, apart
from laconic.kernels.bitpack.reference import pack_bytes, unpack_bytes
from laconic.kernels.minmax.dither import rounded_up
from laconic.kernels.minmax.faults import Faults, check_faults
from laconic.kernels.minmax.form import MinMaxForm, minmax_nbytes
from laconic.kernels.minmax.rows import Rows, alike, filled, pieces, rows_of
from laconic.kernels.tiles import table

FARTHEST = 2.0**126  # extremes are clipped here: nothing overflows


def not_finite(number: int, segments: Segments) -> NonFiniteError:
    return NonFiniteError(
        f"a range has no place for NaN or Inf, but tensor {number} of the message "
        f"({segments.sizes[number]} elements) holds them: skip such a step, as `compress` does"
    )


def encode(x: Tensor, segments: Segments, keys: Sequence[int], form: MinMaxForm) -> Tensor:
    wires: list[tuple[Tensor, Tensor] | None] = [None] * len(segments)
    flags = []
    views = pieces(x, segments)
    for numbers in alike(segments.sizes, form.widths, form.block):
        rows = rows_of(tuple(segments.sizes[i] for i in numbers), form.block)
        width, drawn = form.widths[numbers[0]], [keys[i] for i in numbers] if form.stochastic else None
        flat = _joined(x, Segments(tuple(segments.starts[i] for i in numbers), rows.sizes), rows)
        if flat is None:
            flat = filled([views[i] for i in numbers], rows.gaps)
        heads, codes, bad = _encode_grid(flat, rows, width, drawn)
        head_views = torch.split(heads, rows.head_spans)[::2]
        code_views = torch.split(codes, rows.code_spans(width))[::2]
        for i, head, body in zip(numbers, head_views, code_views, strict=True):
            wires[i] = head, body
        flags.append((numbers, rows, bad))
    _check_finite(flags, segments, x)
    parts = [part for wire in wires if wire is not None for part in wire]
    return torch.cat(parts) if parts else x.new_empty(0, dtype=torch.uint8)


def _joined(x: Tensor, segments: Segments, rows: Rows) -> Tensor | None:
    runs = segments.joined
    return runs.views(x)[0] if len(runs) == 1 and not any(rows.gaps) else None


def _encode_grid(
    flat: Tensor, rows: Rows, width: int, keys: Sequence[int] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return heads, packed levels, and which rows are not finite."""
    grid, most = flat.view(-1, rows.length), float((1 << width) - 1)
    partial = rows.partial(flat.device)
    if partial is not None:  # the last element adds no extreme
        where, last, inside = partial
        ends = grid.index_select(0, where)
        grid.index_copy_(0, where, torch.where(inside, ends, ends.gather(1, last)))
    least, greatest = torch.aminmax(grid, dim=1)
    bad = ~(least.isfinite() & greatest.isfinite())
    low, high = (end.clamp(-FARTHEST, FARTHEST).add_(0.0) for end in (least, greatest))
    unit = (high - low).div_(torch.full((), most, dtype=torch.float32, device=flat.device))
    heads = torch.stack([unit, low], dim=1).view(-1).view(torch.uint8)
    divisor = unit.masked_fill(unit == 0, torch.inf)  # quotient 0
    y = torch.sub(grid, low[:, None]).div_(divisor[:, None])
    if keys is None:
        codes = y.add_(0.5).clamp_(0, most).to(torch.uint8)
    else:
        codes = rounded_up(y.clamp_(0, most).view(-1), rows, keys).view(-1, rows.length)
    if partial is not None:
        codes.index_copy_(0, where, codes.index_select(0, where).mul_(inside))
    return heads, pack_bytes(codes.view(-1), width), bad


def _check_finite(flags: list[tuple[tuple[int, ...], Rows, Tensor]], segments: Segments, x: Tensor) -> None:
    if x.is_cpu:
        if any(bool(bad.any()) for _, _, bad in flags):
            first = min(
                numbers[int(rows.owners(x.device)[bad].min())]
                for numbers, rows, bad in flags
                if bool(bad.any())
            )
            raise not_finite(first, segments)
        return
    found = torch.zeros(len(segments), dtype=torch.int32, device=x.device)
    for numbers, rows, bad in flags:
        found.index_add_(0, table(numbers, x.device)[rows.owners(x.device)], bad.to(torch.int32))
    check(found, lambda number: not_finite(number, segments))


def add_(wire: Tensor, segments: Segments, out: Tensor, form: MinMaxForm, alpha: float) -> Tensor:
    return add_messages_([(wire, segments)], out, [form], alpha, numbered=False)


def add_messages_(
    messages: Sequence[tuple[Tensor, Segments]],
    out: Tensor,
    forms: Sequence[MinMaxForm],
    alpha: float,
    numbered: bool = True,
) -> Tensor:
    """Add several messages after all were found valid.

    If `numbered`, errors have the invalid message's number.
    """
    if not messages:
        return out
    block = forms[0].block
    sizes = tuple(n for _, segments in messages for n in segments.sizes)
    widths = tuple(width for form in forms for width in form.widths)
    parts: list[Tensor] = []
    for (wire, segments), form in zip(messages, forms, strict=True):
        parts += torch.split(wire, _lengths(segments.sizes, form.widths, block))
    grids, faults = [], []
    for numbers in alike(sizes, widths, block):
        rows = rows_of(tuple(sizes[i] for i in numbers), block)
        width = widths[numbers[0]]
        codes = filled([parts[2 * i + 1] for i in numbers], rows.gap_nbytes(width))
        heads = (
            filled([parts[2 * i] for i in numbers], rows.idle_nbytes).clone().view(torch.int32).view(-1, 2)
        )
        faults.append(Faults.of(heads, codes, rows, width, numbers))
        unit, low = heads.view(torch.float32).unbind(dim=1)
        grid = unpack_bytes(codes, width).view(-1, rows.length).to(torch.float32)
        grids.append((numbers, rows, grid.mul_(unit[:, None]).add_(low[:, None]).mul_(alpha)))
    lengths = [len(segments) for _, segments in messages]
    invalid = check_faults(faults, lengths, out.device, numbered)
    values: list[Tensor | None] = [None] * len(sizes)
    for numbers, rows, grid in grids:
        if invalid is not None:
            grid.masked_fill_(invalid, -0.0)  # adding it changes nothing
        for i, value in zip(numbers, torch.split(grid.view(-1), rows.spans)[::2], strict=True):
            values[i] = value
    ranges = tuple(segments for _, segments in messages)
    if apart(ranges):
        ranges = (Segments(tuple(a for each in ranges for a in each.starts), sizes),)
    at = 0
    for segments in ranges:
        pairs = zip(pieces(out, segments), values[at : at + len(segments)], strict=True)
        both = [(view, value) for view, value in pairs if value is not None]
        if len(both) == 1:
            both[0][0].add_(both[0][1])
        elif both:
            torch._foreach_add_([view for view, _ in both], [value for _, value in both])
        at += len(segments)
    return out


@lru_cache(maxsize=512)
def _lengths(sizes: tuple[int, ...], widths: tuple[int, ...], block: int) -> list[int]:
    pairs = zip(sizes, widths, strict=True)
    return [nbytes for n, width in pairs for nbytes in (minmax_nbytes(n, 0, block), (n * width + 7) // 8)]
