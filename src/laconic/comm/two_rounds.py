"""Sums of messages that every rank posts at once: of chunks meant for this rank, and of all in two rounds.

`post(name, sends, recvs)` puts messages on their way by rank, and returns the call that waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Post = Callable[[str, Mapping[int, Tensor], Mapping[int, Tensor]], Callable[[], None]]


def begin_scatter(name: str, chunks: Sequence[Tensor], rank: int, post: Post) -> Callable[[], Tensor]:
    """Each chunk is on its way to its rank; the call adds up those that come here, in rank order."""
    came = [torch.empty_like(chunks[rank]) for _ in chunks]
    wait = post(name, dict(enumerate(chunks)), dict(enumerate(came)))

    def total() -> Tensor:
        wait()
        for chunk in came[1:]:
            came[0].add_(chunk)
        return came[0]

    return total


def begin_sum_(name: str, x: Tensor, size: int, rank: int, post: Post) -> Callable[[], None]:
    """x (n,) becomes the sum over ranks: each adds up a piece and tells it to all.

    The first round is on its way; the call waits for it and does the second.
    """
    pieces = torch.tensor_split(x, size)
    total = begin_scatter(name, pieces, rank, post)

    def end() -> None:
        own = total()
        others = [other for other in range(size) if other != rank]
        post(name, dict.fromkeys(others, own), {other: pieces[other] for other in others})()
        pieces[rank].copy_(own)

    return end
