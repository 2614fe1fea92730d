"""Election: the rank of the least running mean loss leads, and all ranks come to the same result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.core.errors import AttachError, NonFiniteError


class Losses:
    """The last losses of one rank, whose mean it is judged by.

    `window` float64 (average,), written round and round. `told` int64 (2,): losses told in all, and until the
    last election.
    """

    def __init__(self, average: int) -> None:
        self.window = torch.zeros(average, dtype=torch.float64)
        self.told = torch.zeros(2, dtype=torch.int64)

    def note(self, loss: float) -> None:
        """Take one more loss, in the place of the oldest."""
        self.window[int(self.told[0]) % len(self.window)] = loss
        self.told[0] += 1

    def mean(self) -> float:
        """Mean of the losses in the window; NaN before any was told."""
        return float(self.window[: int(self.told[0])].mean())

    def fresh(self) -> int:
        """How many were told since the last election."""
        return int(self.told[0] - self.told[1])


def poll(comm: Comm, losses: Losses, x: Tensor, resting: bool = False) -> list[float]:
    """Every rank's mean loss in rank order, and inf for one that is not finite. Called by all ranks.

    `resting`: this rank has done no step since the last election, and need not have told a loss.

    Wire: 24 bytes a rank. Raises, on every rank alike, `AttachError` where a rank has told no loss since the
    last election, and `NonFiniteError` where the parameters x (n,) of one, or the losses of all, are not
    finite.
    """
    fresh = math.inf if resting else losses.fresh()
    mine = [losses.mean(), fresh, float(x.isfinite().all())]
    answers = comm.all_gather(torch.tensor(mine, dtype=torch.float64, device=x.device))
    heard = [answer.tolist() for answer in answers]
    losses.told[1] = losses.told[0]
    for rank, (_, fresh, _) in enumerate(heard):
        if not fresh:
            raise AttachError(
                f"rank {rank} has told no loss since the last election, and the least loss leads: call"
                " optimizer.note_loss(loss) before optimizer.step() on every rank, or optimizer.step(closure)"
            )
    for rank, (_, _, finite) in enumerate(heard):
        if not finite:
            raise NonFiniteError(f"the parameters of rank {rank} are not finite: its training has diverged")
    scores = [loss if math.isfinite(loss) else math.inf for loss, _, _ in heard]
    if min(scores) == math.inf:
        raise NonFiniteError("the losses of all ranks are NaN or infinite: nobody can lead")
    return scores


def elect(scores: Sequence[float], ranks: Iterable[int]) -> int | None:
    """Who of these ranks leads: the first of the least score; None where all of them have inf.

    >>> elect([0.5, 0.2, 0.2, float("inf")], [1, 2, 3]), elect([0.5, float("inf")], [1])
    (1, None)
    """
    best = min(ranks, key=lambda rank: (scores[rank], rank))
    return best if math.isfinite(scores[best]) else None
