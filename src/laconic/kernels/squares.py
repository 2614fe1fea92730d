"""Transform of tensors cut into squares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max


def by_squares(
    x: Tensor,
    sizes: Sequence[int],
    side: int,
    at_once: int,
    transform: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """Cut consecutive tensors of flat x float32 (n,) into squares and transform each.

    A tensor is cut into squares of `side`, its rest into squares of half the side, down to 2; up to three
    elements stay unchanged. `transform` maps side t and squares float64 (m, t, t) to such squares. A CPU
    converts `at_once` elements together.
    """
    sides, lengths = _runs(tuple(sizes), side)
    parts = list(torch.split(x, list(lengths)))
    while side > 1:
        mine = [i for i, each in enumerate(sides) if each == side]
        if mine:
            made = _transformed([parts[i] for i in mine], side, at_once, transform)
            for i, part in zip(mine, torch.split(made, [lengths[i] for i in mine]), strict=True):
                parts[i] = part
        side //= 2
    return torch.cat([x[:0], *parts])


def _transformed(
    parts: Sequence[Tensor], side: int, at_once: int, transform: Callable[[int, Tensor], Tensor]
) -> Tensor:
    flat = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    step = max(side * side, at_once) if flat.is_cpu else flat.numel()
    out = torch.empty_like(flat)
    for begin in range(0, flat.numel(), step):
        squares = flat[begin : begin + step].to(torch.float64).view(-1, side, side)
        out[begin : begin + step] = transform(side, squares).clamp_(-LARGEST, LARGEST).flatten()
    return out


@lru_cache(maxsize=512)
def _runs(sizes: tuple[int, ...], side: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return side and elements of each run; side 0 for the rest of a tensor."""
    runs: list[tuple[int, int]] = []
    for n in sizes:
        each = side
        while each > 1:
            whole = n - n % (each * each)
            runs += [(each, whole)] if whole else []
            n, each = n - whole, each // 2
        runs += [(0, n)] if n else []
    return tuple(side for side, _ in runs), tuple(length for _, length in runs)
