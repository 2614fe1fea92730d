"""Fragments: tensors of a model in shares of about equal size, with separate outer steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core.layout import Layout, Segments


@dataclass(frozen=True)
class Fragment:
    """Packed tensors of a model: `layout` has m elements, `at` their positions in the model.

    Outer steps start after steps `first`, `first` + every, ...
    """

    layout: Layout
    at: Segments
    first: int

    def take(self, flat: Tensor) -> Tensor:
        return torch.cat(self.at.views(flat))

    def put_(self, flat: Tensor, part: Tensor) -> None:
        for view, new in zip(self.at.views(flat), self.layout.segments.views(part), strict=True):
            view.copy_(new)

    def is_due(self, steps: int, every: int) -> bool:
        return steps >= self.first and (steps - self.first) % every == 0

    def begun(self, steps: int, every: int) -> int:
        return (steps - self.first) // every + 1 if steps >= self.first else 0


def fragments_of(layout: Layout, count: int, every: int) -> Iterator[Fragment]:
    """Yield the nonempty fragments, at most `count`, whose outer steps are evenly spaced.

    Large tensors go first, each to the smallest fragment, so that fragments have tensors from all depths.
    """
    loads, shares = [0] * count, [set[str]() for _ in range(count)]
    for entry in sorted(layout, key=lambda entry: -entry.numel):
        least = loads.index(min(loads))
        loads[least] += entry.numel
        shares[least].add(entry.name)
    for i, names in enumerate(shares):
        part = layout.named(names)
        if len(part):
            packed = Layout.of((entry.name, entry.shape) for entry in part)
            yield Fragment(packed, part.segments, (i + 1) * every // count)
