"""Scatter-reduce: every rank adds up its share of all gradients, and tells the others: low bits both ways.

The reduction of CGX (Markov et al. 2022, arXiv:2111.08617, its release IST-DASLab/torch_cgx [V]). Each tensor
is cut in as many pieces as there are ranks (see `cuts`); with ranks r = 0..N-1, on the rank p of a piece:

    1. scatter   s = 1/N * (x_p + sum over r != p, in this order, of decode(encode(x_r)))
    2. gather    mean = decode(encode(s)), on every rank, p too: replicas are bit-identical

Traffic of a rank is that of any all-reduce, 2 (N - 1) / N messages of the whole, however large N is, where
`gather` receives N - 1. Two roundings on the way. What the first loses, error feedback keeps on the rank that
sent it. What the second loses is lost; with feedback='both' the rank p keeps it, as a server does:

    2. gather    x = e_p + s     mean = decode(encode(x))     e_p = x - mean

Along a ring or up trees a sum is rounded at each hop. With feedback='both' the rank r that rounds it keeps
the loss, N-fold, in the residual of its own gradient [ours], from where it goes out at its next turn:

    1. hop       y = x_r/N + decode(what came)       goes on: encode(y)       e_r = N (y - decode(encode(y)))

Then mean = average of what all ranks account for as sent, so nothing is lost, and the average of T means errs
by the sum of all residuals over T. Codecs that drop entries do as well as through `server`: an entry that is
due passes all hops in one step, and what waits does so on the inner ranks of its tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.selectors.density_schedule import has_density
from laconic.codecs.sparse import Sparse
from laconic.comm.comm import Comm
from laconic.comm.messages import add_messages_, add_shares_, encoded
from laconic.comm.partition import BLOCK, Partition
from laconic.comm.sent import Sent, SentMessage, SentParts
from laconic.comm.void import all_to_all_or_void, gather_or_void, is_void
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Layout, Segments
from laconic.core.per_layout import PerLayout
from laconic.core.spec import Status
from laconic.core.turn import Turn, mix
from laconic.feedback.memory.contraction import safe_gain
from laconic.reducers import BoundReducer, Reducer
from laconic.reducers.scatter_reduce.cuts import cut, cuts
from laconic.reducers.scatter_reduce.hops import HOPS, LENGTH, travelling_mean
from laconic.reducers.scatter_reduce.mean_residual import MeanResidual
from laconic.reducers.sum import DenseShare

Pattern = Literal["direct", "ring", "tree"]
Legs = Literal["up", "both"]
BOUNDED = 2.0**126  # a mean of x and of values up to here is finite
ANSWER = 0xA57E  # sets the keys of the second rounding apart


@dataclass(frozen=True, repr=False)
class ScatterReduce(Reducer):
    """mean = decode(encode(1/N * sum of decoded pieces)), each piece added up on a rank of its own.

    `pattern`, how the pieces come together: 'direct', each rank sends to all others at once; 'ring', along a
    ring, rounded anew at each of N - 1 hops; 'tree', up binomial trees, rounded anew at each of log2 N (a
    tree a piece, where the release's Horovod ancestor has one tree for everything). Direct takes one round of
    N - 1 messages, a tree log2 N, a ring N - 1 of one message each, always of the same bytes in all. Ring and
    tree take a codec of fixed size, or with feedback='both' a sparse one with a density.

    `feedback`, what roundings lose: 'up', only the direct way up can have error feedback, and what the second
    rounding or a hop loses is lost; 'both', all of it is kept, so that the average of T means errs by
    O(1 / T). 'both' asks for error feedback on the way up, takes a codec that this is safe with, and holds 4
    bytes for each element that a rank adds up. Along a ring the error is several times that of a tree with
    low bits (3 times among 16 ranks at 2 bits), and alike with `topk`.

    Payload: one message of the codec `codec`, of which (N - 1) / N is what goes up and 1 / N what goes
    down; with 'ring' and 'tree' 4 bytes more, as ranks first agree that all of them are finite, and 8 for
    each hop's message of a sparse codec.

    >>> from laconic.core.spec import parse
    >>> parse("scatter_reduce(minmax(bits=4), pattern='ring')")
    scatter_reduce(minmax(), pattern='ring')
    """

    codec: Codec
    pattern: Pattern = "direct"
    feedback: Legs = "up"

    paper: ClassVar[str] = "Markov et al. 2022, arXiv:2111.08617"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "IST-DASLab/torch_cgx"
    examples: ClassVar[tuple[str, ...]] = (
        "scatter_reduce(minmax())",
        "scatter_reduce(minmax(rounding='stochastic'), pattern='ring')",
        "scatter_reduce(minmax(bits=8), pattern='tree')",
        "scatter_reduce(dense())",
        "scatter_reduce(qsgd(coding='rice'))",
        "scatter_reduce(minmax(bits=2, block=16), feedback='both')",
        "scatter_reduce(minmax(bits=2, block=16), pattern='ring', feedback='both')",
        "scatter_reduce(sparse(topk(density=0.05)), pattern='tree', feedback='both')",
    )

    def __post_init__(self) -> None:
        arguments.piece("scatter_reduce: codec", self.codec, Codec, "minmax(bits=4)")
        arguments.choice("scatter_reduce: pattern", self.pattern, get_args(Pattern))
        arguments.choice("scatter_reduce: feedback", self.feedback, get_args(Legs))
        if isinstance(self.codec, Sparse) and (self.pattern == "direct" or self.feedback == "up"):
            raise SpecError(
                f"{self.codec!r} drops entries, and this scatter_reduce cannot keep those of the mean for"
                f" later: take server({self.codec!r}, {self.codec!r}), or pattern='tree' with feedback='both'"
            )
        bounded = isinstance(self.codec, Sparse) and has_density(self.codec.select)
        if self.pattern != "direct" and not (self.codec.fixed_size or bounded):
            raise SpecError(
                f"pattern={self.pattern!r} takes a codec of fixed size, or a sparse one with a density;"
                f" {self.codec!r} is neither: set pattern='direct'"
            )

    @property
    def exact_mean(self) -> bool:
        return self.codec.lossless or self.feedback == "both"

    @property
    def needs_feedback(self) -> bool:
        return self.feedback == "both" or super().needs_feedback

    @property
    def unaccountable(self) -> str | None:
        if self.pattern == "direct" or self.feedback == "both":
            return None
        return "each hop rounds a sum of several ranks' gradients, which it keeps only with feedback='both'"

    def bind(self, layout: Layout, comm: Comm) -> TwoHalves:
        residual = None
        if self.feedback == "both":
            safe_gain(self.codec, layout)
            residual = MeanResidual(layout, comm)
        return TwoHalves(layout, comm, self.pattern, lambda part, step: self.codec.at(step), residual)

    def nbytes(self, layout: Layout) -> int:
        most = most_nbytes(self.codec, layout) + 4 * (self.pattern != "direct")
        blocks = sum(-(-entry.numel // BLOCK) for entry in layout)  # more than messages
        return most if self.codec.fixed_size or self.pattern == "direct" else most + LENGTH * blocks

    def feedback_codec(self) -> Codec | None:
        return None if self.unaccountable else self.codec


class TwoHalves(BoundReducer):
    """At work: `scatter`, then `gather`. Sharded training calls the first alone.

    `codec_of` says which codec carries some pieces at a step: the same on every rank. `residual` keeps what
    `gather` rounds off.
    """

    def __init__(
        self,
        layout: Layout,
        comm: Comm,
        pattern: Pattern,
        codec_of: Callable[[Layout, int], Codec],
        residual: MeanResidual | None = None,
    ) -> None:
        self._comm = comm
        self._pattern = pattern
        self._codec_of = codec_of
        self._residual = residual
        bounds = cuts(layout, comm.size)
        self._partition = PerLayout(lambda bucket: cut(bucket, bounds, comm.rank))

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        if self._residual is not None:
            self._residual.begin(turn.step)
        partition = self._partition(layout)
        mean, sent = self.scatter(x, partition, turn, out)
        if self.gather(mean, partition, turn, out, alpha):
            return sent
        self.put_back(layout)
        return None

    def scatter(
        self, x: Tensor | None, partition: Partition, turn: Turn, out: Tensor
    ) -> tuple[Tensor | None, Sent | None]:
        """Mean over ranks of this rank's pieces, float32 (home.numel,), and this rank's share of all means.

        Both None where a gradient is not finite, on whatever rank. `out`: where the mean will stand; `x` may
        be the same.
        """
        if self._pattern != "direct":
            return self._travel(x, partition, turn, out)
        comm, parts, home = self._comm, partition.parts, partition.home
        codecs = self._codecs(partition, turn.step)
        wires, joined = None, None
        if x is not None:
            wires, joined = self._wires(x, partition, codecs, turn)
        came = all_to_all_or_void(comm, wires, out.device, partition.due)
        if x is None or wires is None or came is None:
            return None, None
        own = parts[comm.rank].segments.gathered(x)
        others = _others(comm.rank, comm.size)
        codec = self._codec_of(home, turn.step)
        arrived = [(came[rank], home.segments) for rank in others]
        mean = own / _size(comm.size, own.device)
        if others:
            add_shares_(mean, codec, others, arrived, 1 / comm.size)
        apart = own if x is out or len(parts[comm.rank].segments) != 1 else own.clone()
        shares: tuple[Sent, ...]
        if joined is not None:
            shares = (SentMessage(codecs[others[0]], joined, partition.others.segments),)
        else:
            shares = tuple(SentMessage(codecs[rank], wires[rank], parts[rank].segments) for rank in others)
        return mean, SentParts((DenseShare(parts[comm.rank].segments, apart, 1.0), *shares))

    def gather(
        self, mean: Tensor | None, partition: Partition, turn: Turn, out: Tensor, alpha: float
    ) -> bool:
        """out[bucket] = alpha * mean of all pieces, as all ranks decode it. False where one is not finite."""
        home, wire, residual = partition.home, None, self._residual
        if mean is not None and residual is not None:
            mean = residual.add_to_(mean, home)
        codecs = self._codecs(partition, turn.step)
        codec = self._codec_of(home, turn.step)
        if mean is not None and self._is_finite(mean, home, codec):
            # Keys of its own: with those of this rank's up-messages the roundings would not be independent.
            wire = encoded(mean, home, codec, Turn(turn.step, turn.rank, mix(turn.seed, ANSWER)))
            if residual is not None and home.numel:
                left = codec.decode_segments_add_(wire, home.segments, mean, -1.0)
                residual.keep(left, home, turn.step)
        wires = gather_or_void(self._comm, wire, out.device, partition.due)
        if wires is None:
            return False
        partition.bucket.segments.zero_(out)
        if alike(codecs):
            shares = [*zip(wires, partition.ranges, strict=True)]
            add_shares_(out, codecs[0], range(len(wires)), shares, alpha)
        else:
            messages = map(SentMessage, codecs, wires, partition.ranges)
            add_messages_(out, enumerate(messages), alpha)
        return True

    def _is_finite(self, mean: Tensor, home: Layout, codec: Codec) -> bool:
        """Whether a mean is finite. It always is, without a residual, if what the codec sends is not large.

        mean = (x + sum of N - 1 decoded values) / N. On a GPU the host then waits for nothing.
        """
        if not mean.is_cpu and self._residual is None and codec.normal[1] <= BOUNDED:
            return True
        return kernels.all_finite(mean, home.segments.merged)

    def _codecs(self, partition: Partition, step: int) -> list[Codec]:
        """The codec of each rank's pieces."""
        return [self._codec_of(part, step) for part in partition.parts]

    def _wires(
        self, x: Tensor, partition: Partition, codecs: Sequence[Codec], turn: Turn
    ) -> tuple[list[Tensor], Tensor | None]:
        """The message for each rank, uint8; empty for this one. All in one too, if one call made them."""
        rank, parts = self._comm.rank, partition.parts
        codec = codecs[rank - 1]
        if codec.concatenates and codec.fixed_size and alike(codecs):
            joined = encoded(x, partition.others, codec, turn)
            nbytes = nbytes_of(codec, partition.ranges, rank)
            return list(joined.split_with_sizes(nbytes)), joined if len(parts) > 1 else None
        empty = x.new_empty(0, dtype=torch.uint8)
        pairs = enumerate(zip(parts, codecs, strict=True))
        return [empty if r == rank else encoded(x, part, each, turn) for r, (part, each) in pairs], None

    def _travel(
        self, x: Tensor | None, partition: Partition, turn: Turn, out: Tensor
    ) -> tuple[Tensor | None, Sent | None]:
        """`scatter` along a ring or up a tree."""
        comm = self._comm
        if is_void(comm, x is not None, out.device) or x is None:
            return None, None
        hops = HOPS[self._pattern](comm.rank, comm.size)

        def codec_of(part: Layout) -> Codec:
            return self._codec_of(part, turn.step)

        left: dict[int, Tensor] | None = None if self._residual is None or x is out else {}
        mean = travelling_mean(x, partition.parts, hops, codec_of, turn, comm, left)
        runs = partition.bucket.segments.merged
        kept = torch.cat([x[:0], *runs.views(x)]) if x is not out else None
        # A hop's loss is of the mean: in a rank's own gradient it weighs as many times as there are ranks.
        lost = (DenseShare(partition.parts[i].segments, part, -comm.size) for i, part in (left or {}).items())
        return mean, SentParts((DenseShare(runs, kept, 1.0), *lost))

    def put_back(self, layout: Layout) -> None:
        if self._residual is not None:
            self._residual.put_back(self._partition(layout).home)

    @property
    def holds_back(self) -> bool:
        return self._residual is not None

    def discard(self) -> None:
        if self._residual is not None:
            self._residual.discard()

    def state_dict(self) -> dict[str, Tensor]:
        """What the second rounding has left behind of this rank's pieces, and zeros for the others."""
        return {} if self._residual is None else self._residual.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self._residual is None:
            super().load_state_dict(state)
        else:
            self._residual.load_state_dict(state)


def alike(codecs: Sequence[Codec]) -> bool:
    """Whether all codecs are equal."""
    return list(codecs).count(codecs[0]) == len(codecs)


@lru_cache(maxsize=512)
def nbytes_of(codec: Codec, ranges: tuple[Segments, ...], rank: int) -> list[int]:
    """Bytes of the message for each rank; 0 for this one. Do not change it."""
    return [0 if r == rank else codec.message_nbytes(segments) for r, segments in enumerate(ranges)]


@lru_cache(maxsize=512)
def _others(rank: int, size: int) -> tuple[int, ...]:
    return tuple(other for other in range(size) if other != rank)


@lru_cache(maxsize=64)
def _size(size: int, device: torch.device) -> Tensor:
    """The size as float32 (): for a number a GPU multiplies by the reciprocal."""
    return torch.full((), size, dtype=torch.float32, device=device)


def most_nbytes(codec: Codec, layout: Layout) -> int:
    """The most that all pieces of these tensors can be, in a group of any size: uncut, or a block each."""
    total = 0
    for entry in layout:
        blocks, rest = divmod(entry.numel, BLOCK)
        cut = blocks * codec.message_nbytes(Segments.whole(BLOCK))
        cut += codec.message_nbytes(Segments.whole(rest)) if rest else 0
        total += max(cut, codec.message_nbytes(Segments.whole(entry.numel)) if entry.numel else 0)
    return total
