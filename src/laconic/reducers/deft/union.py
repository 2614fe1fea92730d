"""Union: each rank chooses entries in its own part, and all average their values at the union.

Common core of DEFT, MiCRO and ExDyna. Of N parts of the buffer, rank r chooses in part (step + r) mod N:

    1. all_gather of the chosen positions           S = union of the ranks' choices
    2. all_reduce of every rank's own x[S]          mean[S] = 1/N * sum over ranks of x_r[S], and 0 elsewhere

Message of a rank, for a part of s segments with K chosen entries:

    K, m         uint32 (2,)
    counts       uint8 (m,)   c_i of each segment, as positions c_0 + .. + c_i + i below K + s, by the coding
    positions    uint8        from their segment's start, by the index coding
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.indices.golomb import GOLOMB
from laconic.comm.comm import Comm
from laconic.comm.messages import SentEntries, sent_by
from laconic.comm.skippable import fits, gather_or_skip, sum_or_skip
from laconic.core import arguments, deferred
from laconic.core.errors import WireError
from laconic.core.framing import CPU, counts_bytes, moved, read_bytes, sent_to, unsigned
from laconic.core.layout import Layout, Segments
from laconic.core.selector import IndexCoding, check_density
from laconic.reducers import BoundReducer, Reducer
from laconic.reducers.sum import Sum

HEAD = 8
Found = tuple[Tensor, Tensor]  # indices int32 (K,) from their segment's start, and counts int64 (s,)


@dataclass(frozen=True, repr=False)
class ChoiceInParts(Reducer):
    """Configuration: `sum()` at density 1. `indices`: coding of positions."""

    density: float = 0.01
    indices: IndexCoding = GOLOMB

    def __post_init__(self) -> None:
        check_density(self.density)
        arguments.piece(f"{self.name}: indices", self.indices, IndexCoding, "golomb()")

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return Sum().bind(layout, comm) if self.density == 1 else self.bind_sparse(layout, comm)

    def nbytes(self, layout: Layout) -> int:
        return Sum().nbytes(layout) if self.density == 1 else self.sparse_nbytes(layout)

    @property
    def needs_feedback(self) -> bool:
        return self.density < 1

    @property
    def ahead(self) -> float:
        return 0.75

    @abstractmethod
    def bind_sparse(self, layout: Layout, comm: Comm) -> BoundReducer:
        """Return the working object for a density below 1."""

    @abstractmethod
    def sparse_nbytes(self, layout: Layout) -> int:
        """Return the most bytes of an exchange at a density below 1."""


@dataclass(frozen=True)
class Parts:
    parts: tuple[Segments, ...]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, part: int) -> Segments:
        return self.parts[part]

    @cached_property
    def joined(self) -> Segments:
        starts = (start for part in self.parts for start in part.starts)
        return Segments(tuple(starts), tuple(size for part in self.parts for size in part.sizes))


def part_of(rank: int, step: int, size: int) -> int:
    return (step + rank) % size


def choices_of_all(
    found: Found | None, parts: Parts, step: int, comm: Comm, coding: IndexCoding, device: torch.device
) -> Found | None:
    """Return all ranks' choices, part by part: indices and counts over `parts.joined`.

    `found` is this rank's choice, or None for a non-finite x: then all return None. Raises `WireError`, with
    the rank, for a damaged message.
    """
    size, wire = comm.size, None
    if found is not None:
        wire = message(found, parts[part_of(comm.rank, step, size)], coding, device)
    wires = gather_or_skip(comm, wire, device)
    if wires is None:
        return None
    wires = moved(wires, CPU)
    choices: list[Found] = []
    for part, segments in enumerate(parts.parts):
        rank = (part - step) % size
        with sent_by(rank):
            choices.append(read(wires[rank], segments, coding))
    indices = torch.cat([indices for indices, _ in choices])
    return sent_to(indices, device), torch.cat([counts for _, counts in choices])


def average_(
    x: Tensor, layout: Layout, segments: Segments, union: Found, comm: Comm, out: Tensor, alpha: float
) -> SentEntries | None:
    """Write out = alpha * mean over ranks of x at the union, and zero in the rest of the layout.

    Returns this rank's share; None on every rank if the sum overflows float32.
    """
    own = kernels.gather(x, segments, *union)
    total: Tensor | None = own
    if own.numel():
        total = sum_or_skip(comm, own.clone(), own.numel(), out.device)
    if total is None:
        return None
    if deferred.is_late() and not fits([total], alpha / comm.size):
        return None
    mean = total
    deferred.write(
        lambda: kernels.scatter_add_(layout.segments.zero_(out), segments, *union, mean, alpha / comm.size)
    )
    return SentEntries(segments, *union, own)


def message(found: Found, segments: Segments, coding: IndexCoding, device: torch.device) -> Tensor:
    indices, counts = found
    k, s = indices.numel(), len(segments)
    ends = (counts + 1).cumsum(0) - 1
    code = coding.encode(
        ends.to(torch.int32), torch.tensor([s], dtype=torch.int64, device="cpu"), Segments.whole(k + s)
    )
    head = counts_bytes(torch.tensor([k, code.numel()], dtype=torch.int64, device="cpu"))
    return torch.cat([sent_to(torch.cat([head, code]), device), coding.encode(indices, counts, segments)])


def read(wire: Tensor, segments: Segments, coding: IndexCoding) -> Found:
    head, rest = read_bytes(wire, HEAD, "the head of a message")
    k, m = unsigned(head).tolist()
    if k > segments.numel:
        raise WireError(f"{k} entries cannot be chosen among {segments.numel}")
    code, positions = read_bytes(rest, m, "the counts")
    ends = coding.decode(
        code.cpu(),
        torch.tensor([len(segments)], dtype=torch.int64, device="cpu"),
        Segments.whole(k + len(segments)),
    )
    counts = ends.to(torch.int64).diff(prepend=torch.tensor([-1], dtype=torch.int64, device="cpu")) - 1
    if int(counts.sum()) != k:  # none is negative; decoding the positions detects too large ones
        raise WireError(f"the counts should add up to {k}, got {int(counts.sum())}")
    return coding.decode(positions, counts, segments), counts


def message_nbytes(k: int, n: int, segments: int, coding: IndexCoding) -> int:
    """Return the most bytes of a message of at most k of n positions in this many segments.

    Codes are concave in (k, n): one segment costs most, except for rounding: a 16th and two bytes each.
    """
    positions = coding.nbytes(min(k, n), n)
    return HEAD + coding.nbytes(segments, k + segments) + positions + positions // 16 + 2 * segments
