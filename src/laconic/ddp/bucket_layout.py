"""Layout of one of DDP's buckets, in real elements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from laconic.core.layout import Entry, Layout


class Bucket(Protocol):
    """The part of DDP's GradBucket that is used here."""

    def index(self) -> int:
        """Position among the buckets of a backward pass."""

    def is_last(self) -> bool:
        """Whether it is the last bucket of the backward pass."""

    def buffer(self) -> Tensor:
        """All gradients, flat."""

    def parameters(self) -> list[Tensor]:
        """The parameters, in order."""

    def gradients(self) -> list[Tensor]:
        """Each parameter's gradient: a view of the buffer."""


def layout_of(names: Iterable[str], bucket: Bucket) -> Layout:
    """Return the layout of a bucket in real elements, with these parameter names."""
    parameters, start = bucket.parameters(), bucket.buffer().storage_offset()
    reals = 2 if parameters[0].is_complex() else 1  # DDP's views count complex elements, all or none
    starts = [reals * int(grad.storage_offset() - start) for grad in bucket.gradients()]
    entries = zip(names, map(real_shape, parameters), starts, strict=True)
    return Layout(tuple(Entry(*each) for each in entries))


def real_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape in real elements: a complex parameter's last dimension doubles, and () becomes (2,).

    So a complex matrix stays a matrix, and a complex vector a vector.

    >>> import torch
    >>> real_shape(torch.zeros(3, 4)), real_shape(torch.zeros(3, 4, dtype=torch.complex64))
    ((3, 4), (3, 8))
    """
    shape = tuple(parameter.shape)
    if not parameter.is_complex():
        return shape
    return (*shape[:-1], 2 * shape[-1]) if shape else (2,)
