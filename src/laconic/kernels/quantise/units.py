"""Units of 16 elements, or of 80 in base 3, whose codes fill whole bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core.layout import Segments
from laconic.kernels.quantise.form import Form
from laconic.kernels.quantise.places import Places, chunks, owners, places


@dataclass(frozen=True)
class Units:
    """Units [begin, end) of all tensors.

    `of` int64 (c,) is each unit's tensor, `number` its number there.
    """

    at: Places
    begin: int
    end: int
    of: Tensor
    number: Tensor
    alone: bool

    @property
    def position(self) -> Tensor:
        columns = torch.arange(self.at.unit, dtype=torch.int64, device=self.of.device)
        return (self.number * self.at.unit)[:, None] + columns

    @property
    def inside(self) -> Tensor:
        return self.position < self.at.sizes[self.of, None]

    def of_x(self, x: Tensor, segments: Segments) -> Tensor:
        if self.alone:
            n, begin = segments.sizes[0], self.begin * self.at.unit
            part = x[segments.starts[0] + begin : segments.starts[0] + min(n, self.end * self.at.unit)]
            missing = (self.end - self.begin) * self.at.unit - part.numel()
            return torch.nn.functional.pad(part, (0, missing)).view(-1, self.at.unit)
        position = self.position
        inside = position < self.at.sizes[self.of, None]
        index = (position + self.at.starts[self.of, None]) * inside
        return torch.where(inside, x.take(index), torch.zeros((), dtype=x.dtype, device=x.device))

    def block(self, form: Form) -> Tensor:
        """Return blocks of units (c, 1), or of elements (c, unit)."""
        first = self.at.first_block[self.of, None]
        if not form.block:
            return first
        if form.block % self.at.unit == 0:
            return first + per_block(self.number * self.at.unit, form)[:, None]
        return (first + per_block(self.position, form)).clamp(max=self.at.blocks - 1)

    def bytes_of(self) -> tuple[Tensor, Tensor]:
        """Return the positions of bytes in the wire, and a mask of real ones."""
        columns = torch.arange(self.at.unit_nbytes, dtype=torch.int64, device=self.of.device)
        index = (self.at.body[self.of] + self.number * self.at.unit_nbytes)[:, None] + columns
        return index, index < self.at.body_end[self.of, None]


def all_units(segments: Segments, form: Form, device: torch.device) -> Iterator[Units]:
    at = places(segments, form, device)
    for begin, end in chunks(at.units, at.unit, device):
        of = owners(at.first_unit, at.unit_counts, begin, end)
        number = torch.arange(begin, end, dtype=torch.int64, device=device) - at.first_unit[of]
        yield Units(at, begin, end, of, number, len(segments) == 1)


def per_block(position: Tensor, form: Form) -> Tensor:
    if form.block & form.block - 1:
        return torch.div(position, form.block, rounding_mode="floor")
    return position >> (form.block.bit_length() - 1)
