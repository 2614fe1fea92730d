"""Gaps between ascending positions in a few bit widths, chosen per tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.framing import sent_to
from laconic.core.layout import Segments
from laconic.kernels import dispatch
from laconic.kernels.entropy import check_ascending, check_coded
from laconic.kernels.gap_widths import reference
from laconic.kernels.gap_widths.widths import gap_widths_bound as gap_widths_bound


def gap_widths_encode(indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Encode gaps int32 (K,) in 1, 2, 4 or 8 widths per segment, uint8 (m,): widths, a flag per gap, gaps.

    Two gaps, 0 and 4, in one width of 3 bits: [00 | 00011 | 000 | 100], low bits first.

    >>> indices = torch.tensor([0, 5], dtype=torch.int32)
    >>> gap_widths_encode(indices, torch.tensor([2]), Segments.whole(8)).tolist()
    [12, 16]
    """
    if not indices.is_cpu:  # copying costs less than a launch per segment
        return sent_to(gap_widths_encode(indices.cpu(), counts, segments), indices.device)
    check_ascending(indices, counts, segments)
    if (native := dispatch.native(indices)) is not None:
        wire = torch.empty(len(segments) + 4 * indices.numel(), dtype=torch.uint8, device="cpu")
        return wire[: native.gap_widths_encode(indices, counts, segments.sizes_tensor, wire)].clone()
    return reference.gap_widths_encode(indices, counts, segments)


def gap_widths_decode(wire: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Decode `gap_widths_encode` to int32 (K,). Raises `WireError` for other bytes.

    >>> wire = torch.tensor([12, 16], dtype=torch.uint8)
    >>> gap_widths_decode(wire, torch.tensor([2]), Segments.whole(8)).tolist()
    [0, 5]
    """
    if not wire.is_cpu:
        return sent_to(gap_widths_decode(wire.cpu(), counts, segments), wire.device)
    total = check_coded(wire, counts, segments)
    if (native := dispatch.native(wire)) is not None:
        indices = torch.empty(total, dtype=torch.int32, device="cpu")
        native.gap_widths_decode(wire, counts, segments.sizes_tensor, indices)
        return indices
    return reference.gap_widths_decode(wire, counts, segments)
