"""Borders: the fractions at which every tensor is cut, one part per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.core.layout import Layout, Segments
from laconic.reducers.deft.union import Parts


@dataclass(frozen=True)
class Borders:
    """Part p of a tensor of n elements is [n * cuts[p] // blocks, n * cuts[p + 1] // blocks).

    >>> Borders.even(2, blocks=4).parts(Layout.of([("a", (5,)), ("b", (1,))])).parts
    (Segments(starts=(0, 5), sizes=(2, 0)), Segments(starts=(2, 5), sizes=(3, 1)))
    """

    cuts: tuple[int, ...]
    blocks: int

    @classmethod
    def even(cls, size: int, blocks: int) -> Borders:
        return cls(tuple(blocks * part // size for part in range(size + 1)), blocks)

    @property
    def size(self) -> int:
        return len(self.cuts) - 1

    def parts(self, layout: Layout) -> Parts:
        offsets = torch.tensor([[entry.offset] for entry in layout], dtype=torch.int64, device="cpu").view(
            -1, 1
        )
        sizes = torch.tensor([[entry.numel] for entry in layout], dtype=torch.int64, device="cpu").view(-1, 1)
        cuts = (
            sizes * torch.tensor(self.cuts, dtype=torch.int64, device="cpu") // self.blocks
        )  # (tensors, size + 1)
        starts, lengths = (offsets + cuts[:, :-1]).T.tolist(), cuts.diff(dim=1).T.tolist()
        pairs = zip(starts, lengths, strict=True)
        return Parts(tuple(Segments(tuple(start), tuple(length)) for start, length in pairs))

    def moved(self, counts: Sequence[int]) -> Borders:
        """Move the borders by ExDyna's rule, from the numbers of entries chosen."""
        mean, least = sum(counts) / self.size, max(1, self.blocks // (4 * self.size))
        cuts, load = list(self.cuts), [float(count) for count in counts]
        for border in range(1, self.size):
            for full, slack, way in ((border - 1, border, -1), (border, border - 1, 1)):
                length = cuts[full + 1] - cuts[full]
                if load[full] > 1.05 * mean and load[slack] < mean / 1.05 and length > least:
                    cuts[border] += way
                    load[full] -= sum(counts) / self.blocks
                    load[slack] += sum(counts) / self.blocks
                    break
        return self if tuple(cuts) == self.cuts else Borders(tuple(cuts), self.blocks)

    @property
    def state(self) -> Tensor:
        """int64 (blocks,): 1 at the start of each part; one shape for any number of ranks."""
        marks = torch.zeros(self.blocks, dtype=torch.int64, device="cpu")
        marks[list(self.cuts[:-1])] = 1
        return marks

    def of(self, state: Tensor) -> Borders:
        """Restore from `state`; even borders if it was for another number of ranks."""
        starts = state.nonzero().flatten().tolist()
        if len(starts) != self.size or starts[0] != 0 or state.numel() != self.blocks:
            return Borders.even(self.size, self.blocks)
        return Borders((*starts, self.blocks), self.blocks)
