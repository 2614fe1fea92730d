"""Layout of a DDP bucket in real elements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from laconic.core.layout import Entry, Layout


class Bucket(Protocol):
    """Used part of DDP's GradBucket."""

    def index(self) -> int:
        """Position in the pass."""

    def is_last(self) -> bool:
        """Whether it is the last."""

    def buffer(self) -> Tensor:
        """All gradients, flat."""

    def parameters(self) -> list[Tensor]:
        """Parameters, in order."""

    def gradients(self) -> list[Tensor]:
        """Views of the buffer."""


def layout_of(names: Iterable[str], bucket: Bucket) -> Layout:
    parameters, start = bucket.parameters(), bucket.buffer().storage_offset()
    reals = 2 if parameters[0].is_complex() else 1  # DDP's views count complex elements
    starts = [reals * int(grad.storage_offset() - start) for grad in bucket.gradients()]
    entries = zip(names, map(real_shape, parameters), starts, strict=True)
    return Layout(tuple(Entry(*each) for each in entries))


def real_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape in real elements: complex parameters double the last dimension, and () becomes (2,).

    >>> import torch
    >>> real_shape(torch.zeros(3, 4)), real_shape(torch.zeros(3, 4, dtype=torch.complex64))
    ((3, 4), (3, 8))
    """
    shape = tuple(parameter.shape)
    if not parameter.is_complex():
        return shape
    return (*shape[:-1], 2 * shape[-1]) if shape else (2,)
