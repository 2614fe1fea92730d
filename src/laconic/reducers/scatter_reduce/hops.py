"""Sums along a ring or up a tree: each rank on the path adds its own part and rounds again.

    ring   size - 1 hops; the piece of rank r starts at rank r + 1 and passes all others before it ends at r
    tree   ceil(log2 size) hops; of each pair of ranks one sends its sum to the other (binomial). Every piece
           has a tree rooted at its rank, so that the load is equal

A rank sends each piece except its own once.
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
from laconic.core.errors import WireError
from laconic.core.layout import Layout
from laconic.core.turn import Turn

LENGTH = 8  # bytes of a wire's length field


@dataclass(frozen=True)
class Hop:
    to: int
    source: int
    going: tuple[int, ...]
    coming: tuple[int, ...]


def ring(rank: int, size: int) -> list[Hop]:
    """Return the hops of one rank.

    >>> [(hop.going, hop.coming) for hop in ring(0, size=3)]
    [((2,), (1,)), ((1,), (0,))]
    """
    after, before = (rank + 1) % size, (rank - 1) % size
    return [Hop(after, before, ((rank - hop) % size,), ((rank - hop - 1) % size,)) for hop in range(1, size)]


def tree(rank: int, size: int) -> list[Hop]:
    """Return the hops of one rank. Seen from a root, ranks d, 3d, 5d... send to the rank d before them.

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
    left: dict[int, Tensor] | None = None,
) -> Tensor | None:
    """Return the mean over ranks of parts[rank] of flat x, float32 (parts[rank].numel,), for this rank.

    None if data to forward was not finite: zeros were forwarded. `left` receives this rank's rounding loss in
    the mean of each forwarded piece, float32 (parts[piece].numel,).
    """
    held: dict[int, Tensor] = {}
    finite = True
    size = torch.full(
        (), comm.size, dtype=torch.float32, device=x.device
    )  # a GPU would multiply by a number's reciprocal

    def part(piece: int) -> Tensor:
        known = held.pop(piece, None)
        return torch.cat([x[:0], *parts[piece].segments.views(x)]) / size if known is None else known

    for hop in hops:
        going, coming = (packed(*(parts[i] for i in ids)) for ids in (hop.going, hop.coming))
        sends, recvs = {}, {}
        if going.numel:
            sum_ = torch.cat([part(piece) for piece in hop.going])
            if not kernels.all_finite(sum_, going.segments):
                finite, sum_ = False, torch.zeros_like(sum_)
            wire = codec_of(going).encode_layout(sum_, going, turn)
            sends[hop.to] = framed(wire, codec_of(going), going)
            if left is not None:
                codec_of(going).decode_segments_add_(wire, going.segments, sum_, -1.0)
                left |= zip(hop.going, torch.split(sum_, [parts[i].numel for i in hop.going]), strict=True)
        if coming.numel:
            nbytes = framed_nbytes(codec_of(coming), coming)
            recvs[hop.source] = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
        comm.exchange(sends, recvs)
        if coming.numel:
            sum_ = torch.cat([part(piece) for piece in hop.coming])
            with sent_by(hop.source):
                wire = unframed(recvs[hop.source], codec_of(coming))
                codec_of(coming).decode_segments_add_(wire, coming.segments, sum_)
            held |= zip(hop.coming, torch.split(sum_, [parts[i].numel for i in hop.coming]), strict=True)
    mean = part(comm.rank)
    return mean if finite else None


def framed_nbytes(codec: Codec, layout: Layout) -> int:
    return codec.message_nbytes(layout.segments) + (0 if codec.fixed_size else LENGTH)


def framed(wire: Tensor, codec: Codec, layout: Layout) -> Tensor:
    """Return the wire in a message of `framed_nbytes`.

    Without fixed size: length int64 (1,), wire, zeros. A round for lengths would double a hop's time.
    """
    if codec.fixed_size:
        return wire
    message = wire.new_zeros(framed_nbytes(codec, layout))
    message[:LENGTH] = torch.tensor([wire.numel()], dtype=torch.int64, device="cpu").view(torch.uint8)
    message[LENGTH : LENGTH + wire.numel()] = wire
    return message


def unframed(message: Tensor, codec: Codec) -> Tensor:
    if codec.fixed_size:
        return message
    head, rest = message[:LENGTH], message[LENGTH:]
    (nbytes,) = head.cpu().view(torch.int64).tolist()
    if not 0 <= nbytes <= rest.numel():
        raise WireError(f"a wire of {nbytes} bytes in a message of {rest.numel()}")
    return rest[:nbytes]
