"""Ascending positions as gaps in a few widths of bits, which are chosen for each tensor. See README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels import dispatch
from laconic.kernels.entropy import check_ascending, check_coded
from laconic.kernels.units import reference
from laconic.kernels.units.plan import units_bound as units_bound


def units_encode(indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Gaps int32 (K,) in 1, 2, 4 or 8 widths a segment, uint8 (m,): widths, a flag a gap, then the gaps.

    Two gaps, 0 and 4, in one width of 3 bits: [00 | 00011 | 000 | 100], low bits first.

    >>> units_encode(torch.tensor([0, 5], dtype=torch.int32), torch.tensor([2]), Segments.whole(8)).tolist()
    [12, 16]
    """
    check_ascending(indices, counts, segments)
    if (native := dispatch.native(indices)) is not None:
        wire = torch.empty(len(segments) + 4 * indices.numel(), dtype=torch.uint8)
        return wire[: native.units_encode(indices, counts, segments.sizes_tensor, wire)].clone()
    return reference.units_encode(indices, counts, segments)


def units_decode(wire: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Indices int32 (K,) of what `units_encode` made. `WireError` for bytes that it cannot have made.

    >>> units_decode(torch.tensor([12, 16], dtype=torch.uint8), torch.tensor([2]), Segments.whole(8)).tolist()
    [0, 5]
    """
    total = check_coded(wire, counts, segments)
    if (native := dispatch.native(wire)) is not None:
        indices = torch.empty(total, dtype=torch.int32)
        native.units_decode(wire, counts, segments.sizes_tensor, indices)
        return indices
    return reference.units_decode(wire, counts, segments)
