"""Selected entries whose number is not yet known to the host."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Padded:
    """Selected entries that the host has not counted yet.

    indices: int32, the selected ones followed by padding. totals: int64 (2, s), entries of each segment that
    reach its threshold, and selected entries. If more than `room` reach a threshold, the indices are invalid.
    """

    indices: Tensor
    totals: Tensor
    room: int
