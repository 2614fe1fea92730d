"""DEFT: every rank selects in a share of the layers, so that selection gets faster with more ranks.

Yoon and Oh 2023 (ICPP), arXiv:2307.03500; the authors' code is kljp/deft [V]. For ranks i = 0..N-1 at step t,
over a bucket of n elements that sends K:

    K         the bucket's share of density * (elements of the model), by the norms of all tensors at step
              t - 1; density * n in the first step
    pieces    a tensor of more than n / N elements is cut into N near-equal pieces, others are one piece
    bins      N, of near-equal size: the largest piece first, each to the emptiest bin      (LPT)
    q_l       norm of piece l
    k_l       K * q_l / sum of q, at most the piece's size; all ranks send a full piece
    S_i       the k_l largest |x_i| of each piece in bin (t + i) mod N
    mean[S]   1/N * sum over ranks of x_i[S], at the union S of all S_i and the pieces sent in full

Differences from the paper and its code:

    one k_l for all ranks     There from each rank's norms, so sets do not add up to K. Here each rank
                              measures every N-th piece and sends the norms.
    no broadcast              All ranks compute the packing.
    cost of a piece           There n_l log2 k_l, here n_l: bins follow from the layout alone, and rotate.
    at least one per piece    There always, here while entries are left.
    N = 1, k_l = n_l          There full layers are lost when N = 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.messages import Sent, sent_by
from laconic.comm.skippable import gather_or_skip
from laconic.core.errors import WireError
from laconic.core.framing import CPU, moved
from laconic.core.layout import Layout, PerLayout
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.reducers import BoundReducer
from laconic.reducers.deft.bins import Bins, allot
from laconic.reducers.deft.model_share import ModelShare
from laconic.reducers.deft.union import ChoiceInParts, Found, average_, choices_of_all, message_nbytes


@dataclass(frozen=True, repr=False)
class Deft(ChoiceInParts):
    """mean = average of x at the K = density * n entries that the ranks chose, each in its own pieces.

    Over the model K is an integer, at least 1. A bucket's share, at least 1, follows the last step's norms:
    results depend on DDP's buckets. `indices`: coding of positions. Density 1 is `sum()`. State: one number
    per tensor, equal on all ranks.

    Payload per rank: 4 K bytes of values, the positions of the entries it chose, K / N on average, and 4
    bytes for every N-th piece. Error: |x - sent| <= |x|.

    >>> Deft(density=0.001)
    deft(density=0.001)
    """

    paper: ClassVar[str] = "Yoon and Oh 2023, arXiv:2307.03500"
    status: ClassVar[Status] = "partial"
    code: ClassVar[str] = "kljp/deft"
    examples: ClassVar[tuple[str, ...]] = ("deft(density=0.01)", "deft(density=0.3, indices=raw32())")

    def bind_sparse(self, layout: Layout, comm: Comm) -> BoundReducer:
        return _Deft(self, layout, comm)

    def sparse_nbytes(self, layout: Layout) -> int:
        k, tensors = self.budget(layout.numel), len(layout)
        norms = 4 * (tensors + 1)
        return norms + 4 * k + message_nbytes(k, layout.numel, 2 * tensors, self.indices)

    def budget(self, n: int) -> int:
        """Return how many of n entries are sent.

        >>> [Deft(density=0.01).budget(n) for n in (0, 1, 149, 151)]
        [0, 1, 1, 2]
        """
        return min(n, max(1, round(self.density * n)))


class _Deft(BoundReducer):
    def __init__(self, spec: Deft, layout: Layout, comm: Comm) -> None:
        self._spec = spec
        self._share = ModelShare(layout, spec.budget(layout.numel), comm.size)
        self._comm = comm
        self._bins = PerLayout(lambda layout: Bins.of(layout, comm.size))

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        comm, bins = self._comm, self._bins(layout)
        norms = self._norms(x, bins, turn.step, out.device)
        if x is None or norms is None:
            return None
        budget = self._share.budget(layout, turn.step)
        if budget is None:
            budget = self._spec.budget(layout.numel)
        ks = allot(norms, bins.pieces.sizes_tensor, budget)
        found = bins.select(x, ks, comm.rank, turn.step)
        union = choices_of_all(found, bins.parts, turn.step, comm, self._spec.indices, out.device)
        assert union is not None, "the norms have shown that all are finite"
        union = with_full(union, bins, ks)
        sent = average_(x, layout, bins.parts.joined, union, comm, out, alpha)
        if sent is not None:
            self._share.note(norms, bins, layout, turn.step)
        return sent

    def writes_late(self, step: int) -> bool:
        return True

    def put_back(self, layout: Layout) -> None:
        self._share.put_back(layout)

    def state_dict(self) -> dict[str, Tensor]:
        return self._share.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._share.load_state_dict(state)

    def _norms(self, x: Tensor | None, bins: Bins, step: int, device: torch.device) -> Tensor | None:
        own = None if x is None else bins.norms(x, self._comm.rank, step)
        norms = gather_or_skip(self._comm, own, device, dtype=torch.float32)
        if norms is None:
            return None
        measured = []
        for rank, each in enumerate(moved(norms, CPU)):
            expected = bins.measured(rank, step)
            with sent_by(rank):
                if each.numel() != max(1, expected) or not bool((each.isfinite() & (each >= 0)).all()):
                    raise WireError(f"expected {expected} norms, got {each.tolist()}")
            measured.append(each[:expected])
        return bins.all_norms(measured, step)


def with_full(union: Found, bins: Bins, ks: Tensor) -> Found:
    sizes = bins.parts.joined.sizes_tensor
    full = ks[bins.order] == sizes
    if not bool(full.any()):
        return union
    indices, counts = union
    found = [
        torch.arange(n, dtype=torch.int32, device=indices.device) if whole else part
        for part, n, whole in zip(
            torch.split(indices, counts.tolist()), sizes.tolist(), full.tolist(), strict=True
        )
    ]
    return torch.cat(found), torch.where(full, sizes, counts)
