"""Messages of many ranks, decoded in rank order; if one is damaged, the error names the rank that sent it."""

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
    """Wire uint8 (m,) of these tensors of flat x, by this rank's keys; empty if they have no element."""
    return codec.encode_layout(x, layout, turn) if layout.numel else x.new_empty(0, dtype=torch.uint8)


def add_messages_(out: Tensor, messages: Iterable[tuple[int, SentMessage]], alpha: float) -> Tensor:
    """Add alpha times each message to `out`, in their order; each is given with the rank that sent it.

    Neighbours with one codec are decoded in one call. Raises `WireError` with the rank of a damaged message.
    """
    triples = ((rank, share.codec, (share.wire, share.segments)) for rank, share in messages)
    for codec, group in groupby(triples, key=itemgetter(1)):
        ranks, _, shares = zip(*group, strict=True)
        add_shares_(out, codec, ranks, shares, alpha)
    return out


def add_shares_(
    out: Tensor, codec: Codec, ranks: Sequence[int], shares: Sequence[tuple[Tensor, Segments]], alpha: float
) -> Tensor:
    """`add_messages_` for messages of one codec: wires, each with its ranges of `out`."""
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
    """All ranks' messages uint8 (m,) made one, the same on every rank; each rank combines a chunk of them.

    Args:
        up: bytes of each rank's chunk of a message; they add up to m.
        down: bytes of what `combine` makes of each rank's chunk.
        combine: takes all ranks' chunks for this rank, uint8 (N, up[rank]).

    Raises:
        WireError: a chunk has another length; the error names the rank that sent it.
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
                raise WireError(f"{message.numel()} bytes, not {nbytes}")
