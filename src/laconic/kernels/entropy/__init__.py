"""Ascending positions as few bytes: Golomb-Rice and LEB128 coding of the gaps between them.

Indices int32 (K,) count from the start of their segment and ascend inside it; counts int64 (s,) say how many
belong to each segment. Counts and sizes are known to both sides and are not in the wire. See README.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from laconic.core import deferred
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels import checks, dispatch
from laconic.kernels.entropy import reference
from laconic.kernels.entropy.bounds import LONGEST_GAP, check_counts
from laconic.kernels.entropy.bounds import rice_bound as rice_bound
from laconic.kernels.entropy.bounds import rice_parameter as rice_parameter
from laconic.kernels.entropy.tables import Numbers


def ascending(indices: Tensor, counts: Tensor, segments: Segments) -> bool:
    """True if the indices ascend strictly inside their segments, and none lies outside.

    >>> ascending(torch.tensor([0, 2, 1], dtype=torch.int32), torch.tensor([2, 1]), Segments((0, 3), (3, 2)))
    True
    """
    checks.chosen(indices, counts, segments)
    if (native := dispatch.native(indices)) is not None:
        return bool(native.ascending(indices, counts, segments.sizes_tensor))
    check_counts(counts, segments)
    return reference.ascending(indices, counts, segments)


def disorder(indices: Tensor, counts: Numbers, segments: Segments) -> Tensor:
    """Return whether an index does not ascend inside its segment, bool () on the device of the indices.

    Args:
        indices: int32 (K,), those of N messages one after the other.
        counts: int64 (N, s) or (s,), from 0 to the size of each segment, K in all.
        segments: those of each message.
    """
    sizes = np.broadcast_to(segments.sizes_tensor.numpy(), counts.shape)
    return reference.disorder(indices, counts, sizes)


def rice_encode(indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Golomb-Rice code of the gaps, uint8 (m,): low bits of all gaps, then their high parts in unary.

    >>> rice_encode(torch.tensor([0, 5], dtype=torch.int32), torch.tensor([2]), Segments.whole(8)).tolist()
    [0, 9]
    """
    if (native := dispatch.native(indices)) is not None:
        check_ascending(indices, counts, segments)
        wire = torch.empty(native.rice_most(counts, segments.sizes_tensor), dtype=torch.uint8)
        return wire[: native.rice_encode(indices, counts, segments.sizes_tensor, wire)]
    checks.chosen(indices, counts, segments)
    check_counts(counts, segments)
    return reference.rice_encode(indices, counts, segments)


def rice_decode(wire: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Indices int32 (K,) of what `rice_encode` made. Raises `WireError` for bytes that it cannot have made.

    >>> rice_decode(torch.tensor([0, 9], dtype=torch.uint8), torch.tensor([2]), Segments.whole(8)).tolist()
    [0, 5]
    """
    total = check_coded(wire, counts, segments)
    if (native := dispatch.native(wire)) is not None:
        indices = torch.empty(total, dtype=torch.int32)
        native.rice_decode(wire, counts, segments.sizes_tensor, indices)
        return indices
    return reference.rice_decode(wire, counts, segments)


def rice_positions(wires: Sequence[Tensor], counts: Numbers, segments: Segments) -> tuple[Tensor, Tensor]:
    """Decode the positions of N messages of `rice_encode` with as many operations as those of one.

    Args:
        wires: uint8 (m_i,) for each message. They are not trusted.
        counts: positions of each segment of each message, int64 (N, s), from 0 to the size of the segment.
        segments: those of each message.

    Returns:
        Positions in the flat buffer, int64 (K + N - 1,), with a number without meaning between two messages;
        and whether a message is damaged, bool (): then the positions may lie anywhere.

    Raises:
        WireError: for a message of an impossible length, with its number.
    """
    starts = segments.starts_tensor.numpy()
    return reference.rice_places(wires, counts, segments.sizes_tensor.numpy(), starts - 1)


def delta_encode(indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Gaps as LEB128, uint8 (m,): seven bits a byte, low ones first, the top bit says that more follow.

    >>> indices = torch.tensor([0, 5, 200], dtype=torch.int32)
    >>> delta_encode(indices, torch.tensor([3]), Segments.whole(300)).tolist()
    [0, 4, 194, 1]
    """
    check_ascending(indices, counts, segments)
    if (native := dispatch.native(indices)) is not None:
        wire = torch.empty(LONGEST_GAP * indices.numel(), dtype=torch.uint8)
        return wire[: native.delta_encode(indices, counts, segments.sizes_tensor, wire)].clone()
    return reference.delta_encode(indices, counts, segments)


def delta_decode(wire: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Indices int32 (K,) of what `delta_encode` made. `WireError` for bytes that it cannot have made."""
    total = check_coded(wire, counts, segments)
    if not total <= wire.numel() <= LONGEST_GAP * total:
        raise WireError(f"{total} gaps take {total} to {LONGEST_GAP * total} bytes, got {wire.numel()}")
    if (native := dispatch.native(wire)) is not None:
        indices = torch.empty(total, dtype=torch.int32)
        native.delta_decode(wire, counts, segments.sizes_tensor, indices)
        return indices
    return reference.delta_decode(wire, counts, segments)


def check_ascending(indices: Tensor, counts: Tensor, segments: Segments) -> None:
    """Raise `ValueError` unless the indices ascend inside their segments; on a GPU perhaps later."""
    if dispatch.native(indices) is not None:
        if not ascending(indices, counts, segments):
            raise ValueError(reference.NOT_ASCENDING)
        return
    checks.chosen(indices, counts, segments)
    check_counts(counts, segments)
    wrong = disorder(indices, counts.numpy(), segments)
    deferred.check(wrong.to(torch.int32).view(1), lambda _: ValueError(reference.NOT_ASCENDING))


def check_coded(wire: Tensor, counts: Tensor, segments: Segments) -> int:
    """How many indices to expect: at most as many as the segments have elements."""
    checks.flat("wire", wire, torch.uint8)
    checks.per_segment("counts", counts, segments)
    check_counts(counts, segments)
    return int(counts.numpy().sum())
