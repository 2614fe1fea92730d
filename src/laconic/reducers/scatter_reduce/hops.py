"""Sums that travel: along a ring or up a tree, each rank on the way adds its own part and rounds anew.

    ring   size - 1 hops; the piece of rank r starts at rank r + 1 and passes all others before it ends at r
    tree   ceil(log2 size) hops; the ranks pair off, and one of each pair hands over what it has (binomial).
           Every piece has a tree of its own with its rank as the root, so that all ranks are as busy

Either way a rank sends each piece but its own once: the bytes of sending all directly, in fewer messages at a
time. A piece is rounded once a hop, so the error grows with the group, as its size or as its logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic import kernels
from laconic.comm.comm import Comm
from laconic.comm.messages import sent_by
from laconic.comm.partition import packed
from laconic.core.codec import Codec
from laconic.core.layout import Layout
from laconic.core.turn import Turn


@dataclass(frozen=True)
class Hop:
    """One exchange: which pieces go to whom, and which come from whom."""

    to: int
    source: int
    going: tuple[int, ...]
    coming: tuple[int, ...]


def ring(rank: int, size: int) -> list[Hop]:
    """The hops of one rank.

    >>> [(hop.going, hop.coming) for hop in ring(0, size=3)]
    [((2,), (1,)), ((1,), (0,))]
    """
    after, before = (rank + 1) % size, (rank - 1) % size
    return [Hop(after, before, ((rank - hop) % size,), ((rank - hop - 1) % size,)) for hop in range(1, size)]


def tree(rank: int, size: int) -> list[Hop]:
    """The hops of one rank. Seen from a root, rank d, 3d, 5d... hands over to the one d before it.

    >>> [(hop.to, hop.going, hop.source, hop.coming) for hop in tree(0, size=3)]
    [(2, (2,), 1, (0,)), (1, (1,), 2, (0,))]
    """
    hops, distance = [], 1
    while distance < size:
        seen = {piece: (rank - piece) % size for piece in range(size)}
        going = tuple(piece for piece, place in seen.items() if place % (2 * distance) == distance)
        coming = tuple(
            piece for piece, place in seen.items() if place % (2 * distance) == 0 and place + distance < size
        )
        hops.append(Hop((rank - distance) % size, (rank + distance) % size, going, coming))
        distance *= 2
    return hops


HOPS = {"ring": ring, "tree": tree}


def travelling_mean(
    x: Tensor,
    parts: Sequence[Layout],
    hops: list[Hop],
    codec_of: Callable[[Layout], Codec],
    turn: Turn,
    comm: Comm,
) -> Tensor | None:
    """Mean over ranks of parts[rank] of flat x, float32 (parts[rank].numel,), for this rank.

    None where what this rank handed on was not finite: it then handed on zeros. `codec_of` pieces is the
    codec that carries them, of fixed size.
    """
    held: dict[int, Tensor] = {}
    finite = True

    def part(piece: int) -> Tensor:
        """This rank's part of the piece's mean, with what came of others'."""
        known = held.pop(piece, None)
        return torch.cat([x[:0], *parts[piece].segments.views(x)]) / comm.size if known is None else known

    for hop in hops:
        going, coming = (packed(*(parts[i] for i in ids)) for ids in (hop.going, hop.coming))
        sends, recvs = {}, {}
        if going.numel:
            sum_ = torch.cat([part(piece) for piece in hop.going])
            if not kernels.all_finite(sum_, going.segments):
                finite, sum_ = False, torch.zeros_like(sum_)
            sends[hop.to] = codec_of(going).encode_layout(sum_, going, turn)
        if coming.numel:
            nbytes = codec_of(coming).message_nbytes(coming.segments)
            recvs[hop.source] = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
        comm.exchange(sends, recvs)
        if coming.numel:
            sum_ = torch.cat([part(piece) for piece in hop.coming])
            with sent_by(hop.source):
                codec_of(coming).decode_segments_add_(recvs[hop.source], coming.segments, sum_)
            held |= zip(hop.coming, torch.split(sum_, [parts[i].numel for i in hop.coming]), strict=True)
    mean = part(comm.rank)
    return mean if finite else None
