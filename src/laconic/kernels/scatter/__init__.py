"""Reads and writes of chosen entries of a flat buffer; all indices are checked first.

Indices int32 (K,) count from the start of their segment; counts int64 (s,) are per segment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels import checks, dispatch
from laconic.kernels.scatter import reference


def gather(x: Tensor, segments: Segments, indices: Tensor, counts: Tensor) -> Tensor:
    """Return the chosen entries of x, float32 (K,).

    >>> indices, counts = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([1, 1])
    >>> gather(torch.arange(5.0), Segments((0, 3), (3, 2)), indices, counts).tolist()
    [1.0, 3.0]
    """
    checks.buffer("x", x, segments)
    checks.chosen(indices, counts, segments)
    if (native := dispatch.native(x, indices)) is not None:
        out = torch.empty(indices.numel(), dtype=torch.float32, device="cpu")
        native.gather(x, segments, indices, counts, out)
        return out
    return reference.gather(x, segments, indices, counts)


def scatter_add_(
    out: Tensor, segments: Segments, indices: Tensor, counts: Tensor, values: Tensor, alpha: float = 1.0
) -> Tensor:
    """Add alpha * value at each index, in place. Raises `WireError`, before any write, for a bad index."""
    checks.buffer("out", out, segments)
    checks.chosen(indices, counts, segments)
    checks.flat("values", values)
    if values.numel() != indices.numel():
        raise WireError(f"{indices.numel()} indices came with {values.numel()} values")
    if (native := dispatch.native(out, indices, values)) is not None:
        native.scatter_add_(out, segments, indices, counts, values, alpha)
        return out
    return reference.scatter_add_(out, segments, indices, counts, values, alpha)


def scatter_zero_(out: Tensor, segments: Segments, indices: Tensor, counts: Tensor) -> Tensor:
    """Zero `out` at each index, in place. Raises `WireError` as `scatter_add_`."""
    checks.buffer("out", out, segments)
    checks.chosen(indices, counts, segments)
    if (native := dispatch.native(out, indices)) is not None:
        native.scatter_zero_(out, segments, indices, counts)
        return out
    return reference.scatter_zero_(out, segments, indices, counts)


def flat_positions(indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    """Return the flat positions int64 (K,) of chosen entries. Indices are not checked.

    >>> indices, counts = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([1, 1])
    >>> flat_positions(indices, counts, Segments((0, 3), (3, 2))).tolist()
    [1, 3]
    """
    return reference.flat_positions(indices, counts, segments)
