"""Widths: the bits of each tensor that minimise the bytes within an allowed error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.minmax import Rounding
from laconic.core.codec import Codec
from laconic.core.layout import Segments


def grains_of(tensors: int) -> int:
    """Return the number of grains of the allowed error: rounding up costs at most a 64th of it."""
    return 4096 + 64 * tensors


def cheapest(
    costs: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], allowed: float
) -> list[int] | None:
    """Return each tensor's option with the least sum of costs and a sum of errors of at most `allowed`.

    Both are (tensors, options). None if no choice fits. Errors are rounded up to grains.

    >>> cheapest([[20, 30], [2, 3]], [[9.0, 2.0], [9.0, 2.0]], allowed=12.0)
    [0, 1]
    """
    all_grains, infinite = grains_of(len(costs)), torch.iinfo(torch.int64).max // 2
    least = torch.zeros(
        all_grains + 1, dtype=torch.int64, device="cpu"
    )  # cost of the tensors so far, by grains used
    takes: list[tuple[Tensor, list[int]]] = []
    for cost, error in zip(costs, errors, strict=True):
        grains = [-int(-all_grains * each // allowed) if each else 0 for each in error]
        table = torch.full((len(cost), all_grains + 1), infinite, dtype=torch.int64, device="cpu")
        for option, used in enumerate(grains):
            if used <= all_grains:
                table[option, used:] = least[: all_grains + 1 - used] + cost[option]
        least, choice = table.min(dim=0)
        takes.append((choice, grains))
    if int(least[-1]) >= infinite:
        return None
    left, chosen = all_grains, []
    for choice, grains in reversed(takes):
        chosen.append(int(choice[left]))
        left -= grains[chosen[-1]]
    return chosen[::-1]


@dataclass(frozen=True, repr=False)
class Widths(Codec):
    """`minmax` with a width per tensor of a message, known to sender and receiver."""

    widths: tuple[int, ...]
    block: int
    rounding: Rounding

    name: ClassVar[str] = "minmax_of_widths"  # made by `adaptive_bits`, not from a spec string

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    def nbytes(self, n: int) -> int:
        return kernels.minmax_nbytes(n, max(self.widths, default=1), self.block)

    def message_nbytes(self, segments: Segments) -> int:
        return self._form.message_nbytes(segments)

    def omega(self, n: int) -> float:
        return float("inf")  # many widths have no common bound

    def encode_segments(self, x: Tensor, segments: Segments, keys: Sequence[int]) -> Tensor:
        return kernels.minmax_encode(x, segments, keys, self._form)

    def decode_segments_add_(self, wire: Tensor, segments: Segments, out: Tensor, alpha: float = 1) -> Tensor:
        return kernels.minmax_add_(wire, segments, out, self._form, alpha)

    @property
    def _form(self) -> kernels.MinMaxForm:
        return kernels.MinMaxForm(self.widths, self.block, self.rounding)
