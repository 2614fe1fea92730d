"""Selected entries whose number the host does not know yet."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Padded:
    """Selected entries that the host has not counted yet.

    indices: int32, those selected and room behind them. totals: int64 (2, s), entries of each segment that
    reach its threshold, and those selected. If more than `room` reach one, the indices mean nothing.
    """

    indices: Tensor
    totals: Tensor
    room: int
