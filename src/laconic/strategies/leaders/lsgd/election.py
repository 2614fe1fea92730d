"""Election: the rank with the lowest running mean loss leads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.core.errors import AttachError, NonFiniteError


class Losses:
    """Last losses of one rank. `counts` int64 (2,): of all losses, and at the last election."""

    def __init__(self, average: int) -> None:
        self.window = torch.zeros(average, dtype=torch.float64, device="cpu")
        self.counts = torch.zeros(2, dtype=torch.int64, device="cpu")

    def note(self, loss: float) -> None:
        self.window[int(self.counts[0]) % len(self.window)] = loss
        self.counts[0] += 1

    def mean(self) -> float:
        return float(self.window[: int(self.counts[0])].mean())

    def fresh(self) -> int:
        return int(self.counts[0] - self.counts[1])


def poll(comm: Comm, losses: Losses, x: Tensor, resting: bool = False, leads: bool = True) -> list[float]:
    """Return every rank's mean loss, inf if it is not finite. Called by all ranks.

    `resting`: no step since the last election. `leads`: whether this rank can be elected. Wire: 24 bytes per
    rank. Raises on every rank if one has recorded no loss since then, or if some x (n,), or all losses, are
    not finite.
    """
    fresh = math.inf if resting else losses.fresh()
    mine = [losses.mean() if leads else math.inf, fresh, float(x.isfinite().all())]
    answers = comm.all_gather(torch.tensor(mine, dtype=torch.float64, device=x.device))
    reports = [answer.tolist() for answer in answers]
    losses.counts[1] = losses.counts[0]
    for rank, (_, fresh, _) in enumerate(reports):
        if not fresh:
            raise AttachError(
                f"rank {rank} has recorded no loss since the last election, but the lowest loss leads: call"
                " optimizer.note_loss(loss) before optimizer.step() on every rank, or optimizer.step(closure)"
            )
    for rank, (_, _, finite) in enumerate(reports):
        if not finite:
            raise NonFiniteError(f"the parameters of rank {rank} are not finite: its training has diverged")
    scores = [loss if math.isfinite(loss) else math.inf for loss, _, _ in reports]
    if min(scores) == math.inf:
        raise NonFiniteError("the losses of all ranks are NaN or infinite: no rank can lead")
    return scores


def elect(scores: Sequence[float], ranks: Iterable[int]) -> int | None:
    """Return the first rank with the lowest score; None if all scores are inf.

    >>> elect([0.5, 0.2, 0.2, float("inf")], [1, 2, 3]), elect([0.5, float("inf")], [1])
    (1, None)
    """
    best = min(ranks, key=lambda rank: (scores[rank], rank))
    return best if math.isfinite(scores[best]) else None
