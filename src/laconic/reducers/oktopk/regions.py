"""Regions: the elements of a bucket cut into one range per rank, with about equal work.

Cuts are the average of those that divide each rank's chosen entries equally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.core.framing import sent_to
from laconic.core.layout import Segments
from laconic.reducers.entries import Entries


@dataclass(frozen=True)
class Regions:
    """`tensors`: the packed tensors of a bucket. Rank r has the positions from cuts[r] to cuts[r + 1].

    Pieces are the nonempty intersections of regions and tensors.

    >>> regions = Regions(Segments.consecutive([4, 6]), cuts=(0, 7, 10))
    >>> [pieces.sizes for pieces in regions.pieces], regions.tensor_of.tolist()
    ([(4, 3), (3,)], [0, 1, 1])
    """

    tensors: Segments
    cuts: tuple[int, ...]

    @classmethod
    def agreed(
        cls, chosen: Tensor | None, tensors: Segments, comm: Comm, device: torch.device
    ) -> Regions | None:
        """Return common regions from all ranks' chosen positions int64 (K,), ascending.

        None on every rank if one gradient is not finite. One all_reduce of 8 bytes per rank.
        """
        cuts = torch.zeros(
            comm.size, dtype=torch.int64, device="cpu"
        )  # the first counts non-finite gradients
        if chosen is None:
            cuts[0] = 1
        else:
            parts, n = torch.arange(1, comm.size, dtype=torch.int64, device="cpu"), chosen.numel()
            cuts[1:] = chosen.cpu()[parts * n // comm.size] if n else parts * tensors.numel // comm.size
        cuts = comm.all_reduce(cuts.to(device)).cpu()
        if cuts[0]:
            return None
        return cls(tensors, (0, *(cuts[1:] // comm.size).tolist(), tensors.numel))

    @cached_property
    def edges(self) -> Tensor:
        """Starts of the pieces and the end of the last, int64 (p + 1,)."""
        return torch.tensor(sorted({*self.tensors.starts, *self.cuts}), dtype=torch.int64, device="cpu")

    @cached_property
    def tensor_of(self) -> Tensor:
        """Tensor of each piece, int64 (p,)."""
        return torch.searchsorted(self.tensors.starts_tensor, self.edges[:-1], right=True) - 1

    @cached_property
    def first(self) -> Tensor:
        """First piece of each rank, int64 (N + 1,), and the end of the last."""
        return torch.searchsorted(self.edges, torch.tensor(self.cuts, dtype=torch.int64, device="cpu"))

    @cached_property
    def pieces(self) -> tuple[Segments, ...]:
        sizes = self.edges.diff()
        return tuple(
            Segments.consecutive(sizes[a:b].tolist()) for a, b in self.first.unfold(0, 2, 1).tolist()
        )

    def at(self, rank: int) -> slice:
        return slice(int(self.first[rank]), int(self.first[rank + 1]))

    def per_tensor(self, per_piece: Tensor) -> Tensor:
        return torch.zeros(len(self.tensors), dtype=torch.int64, device="cpu").index_add_(
            0, self.tensor_of, per_piece
        )

    def split(self, positions: Tensor, values: Tensor) -> list[Entries]:
        ends = torch.searchsorted(positions, sent_to(self.edges, positions.device)).cpu()
        counts = ends.diff()
        starts = kernels.per_index(self.edges[:-1], counts, positions.device)
        indices = (positions - starts).to(torch.int32)
        found = []
        for rank in range(len(self.pieces)):
            begin, end = ends[self.first[rank]], ends[self.first[rank + 1]]
            found.append(Entries(indices[begin:end], counts[self.at(rank)], values[begin:end]))
        return found

    def join(self, parts: Sequence[Entries]) -> tuple[Tensor, Tensor, Tensor]:
        counts = torch.cat([part.counts for part in parts])
        whole = Entries(
            torch.cat([part.indices for part in parts]), counts, torch.cat([part.values for part in parts])
        )
        return whole.positions(self.edges[:-1]), counts, whole.values
