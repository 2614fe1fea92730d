"""Scatter-reduce: every rank adds up its share of all gradients, and tells the others: low bits both ways.

The reduction of CGX (Markov et al. 2022, arXiv:2111.08617, its release IST-DASLab/torch_cgx [V]). Each tensor
is cut in as many pieces as there are ranks (see `cuts`); with ranks r = 0..N-1, on the rank p of a piece:

    1. scatter   s = 1/N * (x_p + sum over r != p, in this order, of decode(encode(x_r)))
    2. gather    mean = decode(encode(s)), on every rank, p too: replicas are bit-identical

Traffic of a rank is that of any all-reduce, 2 (N - 1) / N messages of the whole, however large N is, where
`gather` receives N - 1. Two roundings on the way; what the second loses is lost, so a codec that drops
entries is refused: `server` keeps that for later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.sparse import Sparse
from laconic.comm.comm import Comm
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.errors import SpecError, WireError
from laconic.core.layout import Layout, Segments
from laconic.core.per_layout import PerLayout
from laconic.core.spec import Status
from laconic.core.turn import Turn, mix
from laconic.reducers.cuts import BLOCK, Cut, Cuts, cuts
from laconic.reducers.deal import Dealt
from laconic.reducers.hops import HOPS, travelling_mean
from laconic.reducers.reducer import BoundReducer, Reducer, Sent, SentMessage
from laconic.reducers.sum import DenseShare

Pattern = Literal["direct", "ring", "tree"]
ANSWER = 0xA57E  # sets the keys of the second rounding apart


@dataclass(frozen=True, repr=False)
class ScatterReduce(Reducer):
    """mean = decode(encode(1/N * sum of decoded pieces)), each piece added up on a rank of its own.

    `pattern`, how the pieces come together: 'direct', each rank sends to all others at once; 'ring', along a
    ring, rounded anew at each of N - 1 hops; 'tree', up binomial trees, rounded anew at each of log2 N (a
    tree a piece, where the release's Horovod ancestor has one tree for everything). Ring and tree take a
    codec of fixed size, and no feedback: what a hop rounds is a sum of several ranks.

    Payload: one message of the codec `message`, of which (N - 1) / N is what goes up and 1 / N what goes
    down; 4 bytes more with 'ring' and 'tree', where ranks first agree that all of them are finite.

    >>> from laconic.core.spec import parse
    >>> parse("scatter_reduce(minmax(bits=4), pattern='ring')")
    scatter_reduce(minmax(), pattern='ring')
    """

    message: Codec
    pattern: Pattern = "direct"

    paper: ClassVar[str] = "Markov et al. 2022, arXiv:2111.08617"
    status: ClassVar[Status] = "verified"
    examples: ClassVar[tuple[str, ...]] = (
        "scatter_reduce(minmax())",
        "scatter_reduce(minmax(rounding='stochastic'), pattern='ring')",
        "scatter_reduce(minmax(bits=8), pattern='tree')",
        "scatter_reduce(dense())",
        "scatter_reduce(qsgd(coding='rice'))",
    )

    def __post_init__(self) -> None:
        arguments.piece("scatter_reduce: message", self.message, Codec, "minmax(bits=4)")
        arguments.choice("scatter_reduce: pattern", self.pattern, get_args(Pattern))
        if isinstance(self.message, Sparse):
            raise SpecError(
                f"{self.message!r} drops entries, and scatter_reduce cannot keep those of the mean for later:"
                f" take server({self.message!r}, {self.message!r}), which does"
            )
        if self.pattern != "direct" and not self.message.fixed_size:
            raise SpecError(
                f"pattern={self.pattern!r} takes a codec of fixed size, {self.message!r} has none:"
                " set pattern='direct'"
            )

    @property
    def exact_mean(self) -> bool:
        return self.message.lossless

    @property
    def unaccountable(self) -> str | None:
        return None if self.pattern == "direct" else "each hop rounds a sum of several ranks' gradients"

    def bind(self, layout: Layout, comm: Comm) -> TwoHalves:
        return TwoHalves(layout, comm, self.pattern, lambda part, step: self.message.at(step))

    def nbytes(self, layout: Layout) -> int:
        return most_nbytes(self.message, layout) + 4 * (self.pattern != "direct")

    def codec(self) -> Codec | None:
        return self.message if self.pattern == "direct" else None


class TwoHalves(BoundReducer):
    """At work: `scatter`, then `gather`. Sharded training calls the first alone.

    A message that should have bytes and is empty, or the other way round, says that a gradient is not finite.
    `codec_of` says which codec carries some pieces at a step: the same on every rank.
    """

    def __init__(
        self, layout: Layout, comm: Comm, pattern: Pattern, codec_of: Callable[[Layout, int], Codec]
    ) -> None:
        self._comm = comm
        self._pattern = pattern
        self._codec_of = codec_of
        self._cuts: Cuts = cuts(layout, comm.size)
        self.cut = PerLayout(lambda bucket: Cut.of(bucket, self._cuts, comm.rank))

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        cut = self.cut(layout)
        if x is out and not kernels.all_finite(x, layout.segments):  # no feedback has looked at it
            x = None
        mean, sent = self.scatter(x, cut, turn, out)
        return sent if self.gather(mean, cut, turn, out, alpha) else None

    def scatter(
        self, x: Tensor | None, cut: Cut, turn: Turn, out: Tensor
    ) -> tuple[Tensor | None, Sent | None]:
        """Mean over ranks of this rank's pieces, float32 (home.numel,), and this rank's share of all means.

        Both None where a gradient is not finite, on whatever rank. `out`: where the mean will stand; `x` may
        be the same.
        """
        if self._pattern != "direct":
            return self._travel(x, cut, turn, out)
        comm, parts = self._comm, cut.parts
        wires = [
            self._message(x, part, turn, out) if r != comm.rank else out.new_empty(0, dtype=torch.uint8)
            for r, part in enumerate(parts)
        ]
        came = comm.all_to_all(wires)
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        if x is None or any(is_void(came[rank], cut.home) for rank in others):
            return None, None
        own = torch.cat([x[:0], *parts[comm.rank].segments.views(x)])
        mean = own / comm.size
        for rank in others:
            self._add_(came[rank], cut.home, turn, mean, 1 / comm.size, rank)
        shares: list[Sent] = [DenseShare(parts[comm.rank].segments, own, 1.0)] if own.numel() else []
        for rank in others:
            if parts[rank].numel:
                shares.append(SentMessage(self._codec(parts[rank], turn), wires[rank], parts[rank].segments))
        return mean, Dealt(tuple(shares))

    def gather(self, mean: Tensor | None, cut: Cut, turn: Turn, out: Tensor, alpha: float) -> bool:
        """out[bucket] = alpha * mean of all pieces, as all ranks decode it. False where one is not finite."""
        if mean is not None and not kernels.all_finite(mean, cut.home.segments):
            mean = None
        # Keys of its own: with those of this rank's up-messages the two roundings would not be independent.
        later = replace(turn, seed=mix(turn.seed, ANSWER))
        wires = self._comm.all_gather(self._message(mean, cut.home, later, out))
        if any(is_void(wire, part) for wire, part in zip(wires, cut.parts, strict=True)):
            return False
        cut.bucket.segments.zero_(out)
        for rank, (wire, part) in enumerate(zip(wires, cut.parts, strict=True)):
            self._add_(wire, part, turn, out, alpha, rank)
        return True

    def _travel(
        self, x: Tensor | None, cut: Cut, turn: Turn, out: Tensor
    ) -> tuple[Tensor | None, Sent | None]:
        """`scatter` along a ring or up a tree."""
        comm = self._comm
        void = comm.all_reduce(torch.tensor([float(x is None)], device=out.device), "max")
        if x is None or bool(void):
            return None, None
        hops = HOPS[self._pattern](comm.rank, comm.size)
        mean = travelling_mean(x, cut, hops, lambda part: self._codec(part, turn), turn, comm)
        runs = cut.bucket.segments.merged
        kept = torch.cat([x[:0], *runs.views(x)]) if x is not out else None
        return mean, DenseShare(runs, kept, 1.0)

    def _codec(self, part: Layout, turn: Turn) -> Codec:
        return self._codec_of(part, turn.step)

    def _message(self, x: Tensor | None, part: Layout, turn: Turn, out: Tensor) -> Tensor:
        """Wire of these pieces of flat x; a void one where x is None."""
        if x is None or not part.numel:
            return out.new_zeros(int(x is None and not part.numel), dtype=torch.uint8)
        return self._codec(part, turn).encode_layout(x, part, turn)

    def _add_(self, wire: Tensor, part: Layout, turn: Turn, out: Tensor, alpha: float, rank: int) -> None:
        """out += alpha * decoded message of a rank, on these pieces."""
        if not part.numel:
            return
        try:
            self._codec(part, turn).decode_segments_add_(wire, part.segments, out, alpha)
        except WireError as error:
            raise WireError(f"the message that rank {rank} sent is damaged: {error}") from error


def is_void(wire: Tensor, part: Layout) -> bool:
    """Whether a message of these pieces says that its rank has a gradient that is not finite."""
    return (wire.numel() == 0) != (part.numel == 0)


def most_nbytes(codec: Codec, layout: Layout) -> int:
    """The most that all pieces of these tensors can be, in a group of any size: uncut, or a block each."""
    total = 0
    for entry in layout:
        blocks, rest = divmod(entry.numel, BLOCK)
        cut = blocks * codec.message_nbytes(Segments.whole(BLOCK))
        cut += codec.message_nbytes(Segments.whole(rest)) if rest else 0
        total += max(cut, codec.message_nbytes(Segments.whole(entry.numel)) if entry.numel else 0)
    return total
