"""Messages of several ranks, decoded in rank order; if one is damaged, the error names its sender."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.sent import SentMessage
from laconic.core.codec import Codec
from laconic.core.deferred import translated
from laconic.core.errors import WireError
from laconic.core.layout import Layout, Segments
from laconic.core.turn import Turn


def sent_by(rank: int) -> AbstractContextManager[None]:
    """Return a context in which each `WireError` names the rank whose message is being read.

    >>> with sent_by(3):
    ...     raise WireError("too short")
    Traceback (most recent call last):
        ...
    laconic.core.errors.WireError: the message that rank 3 sent is damaged: too short
    """
    return translated(lambda error: _damaged(rank, error) if isinstance(error, WireError) else error)


def _damaged(rank: int, error: Exception) -> WireError:
    return WireError(f"the message that rank {rank} sent is damaged: {error}")


def encoded(x: Tensor, layout: Layout, codec: Codec, turn: Turn) -> Tensor:
    """Encode these tensors of flat x with this rank's keys to uint8 (m,); empty without elements."""
    return codec.encode_layout(x, layout, turn) if layout.numel else x.new_empty(0, dtype=torch.uint8)


def add_messages_(out: Tensor, messages: Iterable[tuple[int, SentMessage]], alpha: float) -> Tensor:
    """Add alpha times each message to `out`, in order; each comes with the rank of its sender.

    Consecutive messages of one codec are decoded in one call. `WireError` names the sender of a damaged one.
    """
    triples = ((rank, share.codec, (share.wire, share.segments)) for rank, share in messages)
    for codec, group in groupby(triples, key=itemgetter(1)):
        ranks, _, shares = zip(*group, strict=True)
        add_shares_(out, codec, ranks, shares, alpha)
    return out


def add_shares_(
    out: Tensor, codec: Codec, ranks: Sequence[int], shares: Sequence[tuple[Tensor, Segments]], alpha: float
) -> Tensor:
    """Add messages of one codec, each with its ranges of `out`, as `add_messages_` does."""
    with translated(partial(_by_number, ranks)):
        return codec.decode_messages_add_(shares, out, alpha)


def _by_number(ranks: Sequence[int], error: Exception) -> Exception:
    if not isinstance(error, WireError):
        return error
    number = 0 if len(ranks) == 1 else error.message
    return error if number is None else _damaged(ranks[number], error)


def combined(
    comm: Comm,
    message: Tensor,
    up: Sequence[int],
    down: Sequence[int],
    combine: Callable[[Tensor], Tensor],
) -> Tensor:
    """Combine all ranks' messages uint8 (m,) to one, equal on every rank; each rank combines one chunk.

    Args:
        up: bytes of each rank's chunk of a message; they add up to m.
        down: bytes of each combined chunk.
        combine: combines all ranks' chunks for this rank, uint8 (N, up[rank]).

    Raises:
        WireError: a chunk has the wrong length; the error names its sender.
    """
    chunks = comm.all_to_all(torch.split(message, list(up)))
    _check_nbytes(chunks, [up[comm.rank]] * comm.size)
    results = comm.all_gather(combine(torch.stack(chunks)))
    _check_nbytes(results, down)
    return torch.cat(results)


def _check_nbytes(messages: Sequence[Tensor], expected: Sequence[int]) -> None:
    if [message.numel() for message in messages] == list(expected):
        return
    for rank, (message, nbytes) in enumerate(zip(messages, expected, strict=True)):
        if message.numel() != nbytes:
            with sent_by(rank):
                raise WireError(f"expected {nbytes} bytes, got {message.numel()}")
