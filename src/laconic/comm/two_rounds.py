"""Sums by messages that every rank posts at once: a reduce-scatter, and an all-reduce in two rounds.

`post(name, sends, recvs)` starts the messages, by rank, and returns a function that waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Post = Callable[[str, Mapping[int, Tensor], Mapping[int, Tensor]], Callable[[], None]]


def begin_scatter(name: str, chunks: Sequence[Tensor], rank: int, post: Post) -> Callable[[], Tensor]:
    """Start sending each chunk to its rank; the returned function sums the received ones in rank order."""
    received = [torch.empty_like(chunks[rank]) for _ in chunks]
    wait = post(name, dict(enumerate(chunks)), dict(enumerate(received)))

    def total() -> Tensor:
        wait()
        for chunk in received[1:]:
            received[0].add_(chunk)
        return received[0]

    return total


def begin_sum_(name: str, x: Tensor, size: int, rank: int, post: Post) -> Callable[[], None]:
    """Sum x (n,) over ranks, in place: each rank sums one piece and sends it to all.

    This call starts the first round; the returned function waits for it and does the second.
    """
    pieces = torch.tensor_split(x, size)
    total = begin_scatter(name, pieces, rank, post)

    def end() -> None:
        own = total()
        others = [other for other in range(size) if other != rank]
        post(name, dict.fromkeys(others, own), {other: pieces[other] for other in others})()
        pieces[rank].copy_(own)

    return end
