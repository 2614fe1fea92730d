"""Majority vote: every rank votes with the signs of its gradient; one bit per winner is returned.

Bernstein et al. 2018, arXiv:1802.04434; Bernstein et al. 2019, arXiv:1810.05291. With ranks r = 0..N-1, for
each tensor:

    1. b_r = sign bits of x_r, or rank r's coin where x_r is 0,  m_r = mean |x_r|
    2. m = median over ranks of m_r                  one all_gather of a float32 per tensor
    3. all_to_all of the b_r of all tensors, in N chunks; each rank counts the votes of its chunk
    4. all_gather of the winners w; mean = m * (1 - 2 w), the same bits on all

The factor m is ours: the learning rate means the same as for SGD, and fewer than N/2 faulty ranks cannot move
the (lower) median beyond the others' values. The paper settles ties by sign(0), here a common coin does.

An entry that is 0 on all ranks becomes m or -m, at random. Coins of an odd step are opposite to those before:
two steps cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.messages import Sent, combined, sent_by
from laconic.comm.skippable import gather_or_skip
from laconic.core.errors import WireError
from laconic.core.layout import Layout, Segments
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.reducers import BoundReducer, Reducer
from laconic.reducers.majority_vote.coins import Coins


@dataclass(frozen=True, repr=False)
class MajorityVote(Reducer):
    """mean = (median over ranks of mean |x_r|) * the majority of the ranks' signs, entry by entry.

    Biased, and no rank knows its loss: error feedback is refused. A faulty rank has one vote per sign, but is
    not limited in the one-dimensional tensors that a method sums: `signum()` votes on these too.

    Payload: 1 bit per entry ((N-1)/N of it up, 1/N down), and 4 bytes per tensor.

    >>> from laconic.core.layout import Layout
    >>> MajorityVote().nbytes(Layout.of([("weight", (100, 10)), ("bias", (10,))]))
    135
    """

    paper: ClassVar[str] = "Bernstein et al. 2019, arXiv:1810.05291"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = ("majority_vote()",)

    @property
    def exact_mean(self) -> bool:
        return False

    @property
    def unaccountable(self) -> str | None:
        return "the winning sign is not an average of the sent shares"

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return _MajorityVote(comm)

    def nbytes(self, layout: Layout) -> int:
        return 4 * max(1, len(layout)) + sum(kernels.packed_nbytes(entry.numel, 1) for entry in layout)


@dataclass(frozen=True)
class Vote(Sent):
    """Sign bits sent up, at the common magnitudes of the tensors."""

    bits: Tensor
    scales: Tensor
    segments: Segments

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        return kernels.signed_add_(self.bits, self.scales, self.segments, x, alpha)

    def clear_(self, memory: Tensor) -> Tensor:
        return self.segments.zero_(memory)


@dataclass(frozen=True)
class _MajorityVote(BoundReducer):
    comm: Comm
    detects_non_finite: ClassVar[bool] = True

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        segments, means = layout.segments, None
        if x is not None:
            bits, means = kernels.signs(x, segments)
            abstain_(bits, x, layout, Coins(turn))
        scales = self._scales(means, len(layout), out.device)
        if x is None or scales is None:
            return None
        winners = self._winners(bits, layout, turn) if bits.numel() else bits
        kernels.signed_add_(winners, scales, segments, segments.zero_(out), alpha)
        return Vote(bits, scales, segments)

    def _scales(self, means: Tensor | None, n: int, device: torch.device) -> Tensor | None:
        if means is not None and not bool(means.isfinite().all()):
            means = None
        gathered = gather_or_skip(self.comm, means, device, dtype=torch.float32)
        if gathered is None:
            return None
        whole = all(each.numel() == max(1, n) for each in gathered)
        if not whole or not bool(_magnitudes(torch.stack(gathered)).all()):  # one read
            for rank, each in enumerate(gathered):
                with sent_by(rank):
                    if each.numel() != max(1, n) or not bool(_magnitudes(each).all()):
                        raise WireError(f"expected {n} magnitudes, got {each.tolist()}")
        return torch.stack(gathered).median(dim=0).values[:n]

    def _winners(self, bits: Tensor, layout: Layout, turn: Turn) -> Tensor:
        rank, size, m = self.comm.rank, self.comm.size, bits.numel()
        chunk = -(-m // size)
        counts = [max(0, min(chunk, m - chunk * each)) for each in range(size)]
        ties = torch.zeros_like(bits[: counts[rank]])
        if size % 2 == 0:
            ties.copy_(tossed(layout, Coins(turn), chunk * rank, counts[rank]))
        return combined(self.comm, bits, counts, counts, lambda votes: kernels.majority(votes, ties))


def abstain_(bits: Tensor, x: Tensor, layout: Layout, coins: Coins) -> Tensor:
    zeros = kernels.zeros(x, layout.segments)
    if not bool(zeros.any()):
        return bits
    sizes = [kernels.packed_nbytes(entry.numel, 1) for entry in layout]
    parts = list(zip(layout, torch.split(bits, sizes), torch.split(zeros, sizes), strict=True))
    present = torch.stack([zero.any() for _, _, zero in parts]).tolist()  # one read
    for (entry, votes, zero), some in zip(parts, present, strict=True):
        if some:
            own = coins.own(entry.name, 0, votes.numel()).to(bits.device)
            votes.copy_(votes & ~zero | own & zero)
    return bits


def _magnitudes(x: Tensor) -> Tensor:
    return x.isfinite() & (x >= 0)


def tossed(layout: Layout, coins: Coins, begin: int, count: int) -> Tensor:
    parts, at, end = [torch.empty(0, dtype=torch.uint8, device="cpu")], 0, begin + count
    for entry in layout:
        m = kernels.packed_nbytes(entry.numel, 1)
        first, last = max(begin - at, 0), min(end - at, m)
        if first < last:
            parts.append(coins.common(entry.name, first, last - first))
        at += m
    return torch.cat(parts)
