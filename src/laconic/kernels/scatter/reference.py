"""Reads and writes of chosen entries in plain torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from laconic.core import deferred
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from laconic.kernels.entropy.tables import expanded, uploaded


def flat_positions(indices: Tensor, counts: Tensor, segments: Segments) -> Tensor:
    if not indices.numel():
        return indices.to(torch.int64)
    given = counts.numpy()
    some = given > 0
    table = uploaded(np.stack([segments.starts_tensor.numpy()[some], given[some]]), indices.device)
    (start,) = expanded(table[:1], table[1], indices.numel())
    return indices + start


def positions(indices: Tensor, counts: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Return flat positions, and whether an index is outside its segment.

    Then the CPU raises `WireError`; elsewhere the error may come later, and positions are 0.
    """
    if not indices.numel():
        return indices.to(torch.int64), torch.zeros((), dtype=torch.bool, device=indices.device)
    given = counts.numpy()
    some = given > 0
    starts, sizes = segments.starts_tensor.numpy()[some], segments.sizes_tensor.numpy()[some]
    table = uploaded(np.stack([starts, sizes - 1, given[some]]), indices.device)
    start, last = expanded(table[:2], table[2], indices.numel())
    wrong = ((indices | (last - indices)) >> 63).any()
    places = indices + start
    if not wrong.is_cpu:
        deferred.check(wrong.to(torch.int32).view(1), lambda _: WireError(OUTSIDE))
        return places.masked_fill_(wrong, 0), wrong
    if bool(wrong):
        raise WireError(OUTSIDE)
    return places, wrong


OUTSIDE = "an index lies outside its tensor"


def gather(x: Tensor, segments: Segments, indices: Tensor, counts: Tensor) -> Tensor:
    return x.index_select(0, positions(indices, counts, segments)[0])


def scatter_add_(
    out: Tensor, segments: Segments, indices: Tensor, counts: Tensor, values: Tensor, alpha: float
) -> Tensor:
    places, wrong = positions(indices, counts, segments)
    scaled = values * alpha
    if not wrong.is_cpu:
        scaled.masked_fill_(wrong, -0.0)  # adding it changes nothing
    return out.index_add_(0, places, scaled)


def scatter_zero_(out: Tensor, segments: Segments, indices: Tensor, counts: Tensor) -> Tensor:
    places, wrong = positions(indices, counts, segments)
    if wrong.is_cpu:
        return out.index_fill_(0, places, 0.0)
    return out.index_copy_(0, places, out.index_select(0, places).masked_fill_(~wrong, 0.0))
