"""Golomb-Rice and LEB128 codes of the gaps between ascending positions.

Indices int32 (K,) ascend within their segment, from its start; counts int64 (s,) are per segment. Both sides
know counts and sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from laconic.core import deferred
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.core.selector import Padded
from laconic.kernels import checks, dispatch
from laconic.kernels.entropy import reference
from laconic.kernels.entropy.bounds import (
    LONGEST_GAP,
    low_nbytes,
    rice_parameters,
    unary_most,
)
from laconic.kernels.entropy.bounds import rice_bound as rice_bound
from laconic.kernels.entropy.bounds import rice_parameter as rice_parameter
from laconic.kernels.entropy.tables import Numbers, uploaded

MOST_ENTRIES = 1 << 17  # with one GPU program per tensor
MOST_NBYTES = 1 << 22  # with one GPU program per unary part


def ascending(indices: Tensor, counts: Tensor, segments: Segments) -> bool:
    """Return whether the indices ascend strictly within their segments.

    >>> ascending(torch.tensor([0, 2, 1], dtype=torch.int32), torch.tensor([2, 1]), Segments((0, 3), (3, 2)))
    True
    """
    checks.chosen(indices, counts, segments)
    if (native := dispatch.native(indices)) is not None:
        return bool(native.ascending(indices, counts, segments.sizes_tensor))
    checks.counted(counts, segments)
    return reference.ascending(indices, counts, segments)


def disorder(indices: Tensor, counts: Numbers, segments: Segments) -> Tensor:
    """Return bool () on the device: whether an index does not ascend within its segment.

    indices: int32 (K,) of N consecutive messages with these segments. counts: int64 (N, s) or (s,), from 0 to
    the segment's size, K in all.
    """
    sizes = np.broadcast_to(segments.sizes_tensor.numpy(), counts.shape)
    return reference.disorder(indices, counts, sizes)


def rice_encode(indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Encode the gaps, uint8 (m,): low bits of all, then their high parts in unary.

    >>> rice_encode(torch.tensor([0, 5], dtype=torch.int32), torch.tensor([2]), Segments.whole(8)).tolist()
    [0, 9]
    """
    if (native := dispatch.native(indices)) is not None:
        check_ascending(indices, counts, segments)
        wire = torch.empty(native.rice_most(counts, segments.sizes_tensor), dtype=torch.uint8, device="cpu")
        return wire[: native.rice_encode(indices, counts, segments.sizes_tensor, wire)]
    checks.chosen(indices, counts, segments)
    checks.counted(counts, segments)
    return reference.rice_encode(indices, counts, segments)


def rice_decode(wire: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Decode `rice_encode` to int32 (K,). Raises `WireError` for other bytes.

    >>> rice_decode(torch.tensor([0, 9], dtype=torch.uint8), torch.tensor([2]), Segments.whole(8)).tolist()
    [0, 5]
    """
    total = check_coded(wire, counts, segments)
    if (native := dispatch.native(wire)) is not None:
        indices = torch.empty(total, dtype=torch.int32, device="cpu")
        native.rice_decode(wire, counts, segments.sizes_tensor, indices)
        return indices
    return reference.rice_decode(wire, counts, segments)


def rice_positions(wires: Sequence[Tensor], counts: Numbers, segments: Segments) -> tuple[Tensor, Tensor]:
    """Decode the positions of N messages of `rice_encode` together.

    wires: uint8 (m_i,) per message, not trusted. counts: int64 (N, s), from 0 to the segment's size. Returns
    positions in the flat buffer, int64 (K + N - 1,), with a meaningless number between messages; and whether
    one is damaged, bool (): positions may then be anything. Raises `WireError`, with the message's number,
    for an impossible length.
    """
    starts = segments.starts_tensor.numpy()
    return reference.rice_places(wires, counts, segments.sizes_tensor.numpy(), starts - 1)


def sparse_encode(
    x: Tensor, segments: Segments, indices: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Encode entries of x: counts, Rice-coded positions with their length, and values.

    Returns message uint8 (m,), values float32 (K,) and flat positions int64 (K,); None without a kernel.
    Raises `ValueError` if indices do not ascend within their segments.
    """
    if not len(segments) or indices.numel() > MOST_ENTRIES or not dispatch.gpu(x, indices):
        return None
    from laconic.kernels.entropy import gpu

    checks.buffer("x", x, segments)
    checks.chosen(indices, counts, segments)
    most = _message_most(counts.numpy(), segments, indices.numel())
    message, values, places, facts = gpu.encode(
        x, segments, indices, uploaded(counts.numpy(), x.device), most
    )
    coded, wrong = facts.tolist()
    if wrong:
        raise ValueError(reference.NOT_ASCENDING)
    return message[: 4 * (len(segments) + 1 + indices.numel()) + coded], values, places


def padded_encode(x: Tensor, segments: Segments, chosen: Padded, ks: Tensor) -> tuple[Tensor, ...] | None:
    """Encode at most ks int64 (s,) entries, not yet counted by the host, with one synchronisation.

    Returns message, indices int32 (K,), counts int64 (s,) on the CPU, and values and positions as in
    `sparse_encode`; None if the candidates exceed the room.
    """
    from laconic.kernels.entropy import gpu

    num = len(segments)
    most = _padded_most(tuple(ks.tolist()), segments)
    message, values, places, facts = gpu.encode(x, segments, chosen.indices, chosen.totals[1], most)
    read = torch.cat([facts, chosen.totals.view(-1)]).cpu()
    coded, wrong, *numbers = read.tolist()
    total = sum(numbers[num:])
    if sum(numbers[:num]) > chosen.room:
        return None
    if wrong:
        raise ValueError(reference.NOT_ASCENDING)
    parts = message[: 4 * (num + 1 + total) + coded], chosen.indices[:total], read[2 + num :]
    return *parts, values[:total], places[:total]


def _message_most(counts: Numbers, segments: Segments, total: int) -> int:
    sizes = segments.sizes_tensor.numpy()
    r = rice_parameters(counts, sizes)
    return int(low_nbytes(counts, r).sum() + unary_most(counts, sizes, r)) + 4 * (len(segments) + 1 + total)


@lru_cache(maxsize=256)
def _padded_most(ks: tuple[int, ...], segments: Segments) -> int:
    each = (rice_bound(k, n) + 4 * k + 4 for k, n in zip(ks, segments.sizes, strict=True))
    return 4 + sum(each)


def sparse_add_(wires: Sequence[Tensor], segments: Segments, out: Tensor, alpha: float) -> Tensor | None:
    """Add alpha * the entries of N messages to `out` float32, in order; nothing if one is damaged.

    `wires`: uint8 (m_i,), at least as long as their headers; not trusted. Returns int32 (N,) flags of damaged
    messages; None without a kernel.
    """
    if not len(segments) or not dispatch.gpu(out, *wires):
        return None
    if sum(wire.numel() for wire in wires) > MOST_NBYTES or not all(wire.is_contiguous() for wire in wires):
        return None
    from laconic.kernels.entropy import gpu

    checks.addressable(segments.sizes)
    checks.buffer("out", out, segments)
    return gpu.add_(wires, segments, out, alpha)


def delta_encode(indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Encode gaps as LEB128, uint8 (m,): seven bits per byte, low first; the top bit marks continuation.

    >>> indices = torch.tensor([0, 5, 200], dtype=torch.int32)
    >>> delta_encode(indices, torch.tensor([3]), Segments.whole(300)).tolist()
    [0, 4, 194, 1]
    """
    check_ascending(indices, counts, segments)
    if (native := dispatch.native(indices)) is not None:
        wire = torch.empty(LONGEST_GAP * indices.numel(), dtype=torch.uint8, device="cpu")
        return wire[: native.delta_encode(indices, counts, segments.sizes_tensor, wire)].clone()
    return reference.delta_encode(indices, counts, segments)


def delta_decode(wire: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Decode `delta_encode` to int32 (K,). Raises `WireError` for other bytes."""
    total = check_coded(wire, counts, segments)
    if not total <= wire.numel() <= LONGEST_GAP * total:
        raise WireError(f"{total} gaps take {total} to {LONGEST_GAP * total} bytes, got {wire.numel()}")
    if (native := dispatch.native(wire)) is not None:
        indices = torch.empty(total, dtype=torch.int32, device="cpu")
        native.delta_decode(wire, counts, segments.sizes_tensor, indices)
        return indices
    return reference.delta_decode(wire, counts, segments)


def check_ascending(indices: Tensor, counts: Tensor, segments: Segments) -> None:
    """Raise `ValueError` unless the indices ascend within their segments; on a GPU perhaps later."""
    if dispatch.native(indices) is not None:
        if not ascending(indices, counts, segments):
            raise ValueError(reference.NOT_ASCENDING)
        return
    checks.chosen(indices, counts, segments)
    checks.counted(counts, segments)
    wrong = disorder(indices, counts.numpy(), segments)
    deferred.check(wrong.to(torch.int32).view(1), lambda _: ValueError(reference.NOT_ASCENDING))


def check_coded(wire: Tensor, counts: Tensor, segments: Segments) -> int:
    checks.flat("wire", wire, torch.uint8)
    checks.per_segment("counts", counts, segments)
    checks.counted(counts, segments)
    return int(counts.numpy().sum())
