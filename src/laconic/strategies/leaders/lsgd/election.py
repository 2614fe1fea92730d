"""Election: the rank with the lowest running mean loss leads; all ranks compute the same result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.core.errors import AttachError, NonFiniteError


class Losses:
    """Last losses of one rank; their mean is its score.

    `window` float64 (average,): a ring buffer. `counts` int64 (2,): of all losses, and at the last election.
    """

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
    """Return every rank's mean loss in rank order, inf if it is not finite. Called by all ranks.

    `resting`: this rank has done no step since the last election. `leads`: whether it can be elected. Wire:
    24 bytes per rank. Raises on every rank: `AttachError` if a rank has recorded no loss since the last
    election, `NonFiniteError` if a rank's x (n,), or the losses of all, are not finite.
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
    """Return the leader of these ranks: the first with the lowest score; None if all scores are inf.

    >>> elect([0.5, 0.2, 0.2, float("inf")], [1, 2, 3]), elect([0.5, float("inf")], [1])
    (1, None)
    """
    best = min(ranks, key=lambda rank: (scores[rank], rank))
    return best if math.isfinite(scores[best]) else None
