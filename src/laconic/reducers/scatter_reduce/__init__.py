"""Scatter-reduce: each rank reduces one piece of every tensor, and low-bit messages go both ways.

The reduction of CGX (Markov et al. 2022, arXiv:2111.08617, its release IST-DASLab/torch_cgx [V]). Rank p of r
= 0..N-1 reduces its piece of each tensor (see `cuts`):

    1. scatter   s = 1/N * (x_p + sum over r != p, in this order, of decode(encode(x_r)))
    2. gather    mean = decode(encode(s)), on every rank, p too: replicas are bit-identical

With feedback='both' rank p also stores the loss of the second rounding:

    2. gather    x = e_p + s     mean = decode(encode(x))     e_p = x - mean

and along a ring or up trees each rank r adds N times the loss of its hop to its gradient's residual [ours]:

    1. hop       y = x_r/N + decode(arrived)       sends encode(y)       e_r = N (y - decode(encode(y)))

Then the mean equals the average of the sent shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from laconic.codecs.selectors.density_schedule import has_density
from laconic.codecs.sparse import Sparse
from laconic.comm.comm import Comm
from laconic.comm.partition import BLOCK
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Layout, Segments
from laconic.core.spec import Status
from laconic.feedback.memory.contraction import safe_gain
from laconic.reducers import Reducer
from laconic.reducers.scatter_reduce.hops import LENGTH
from laconic.reducers.scatter_reduce.mean_residual import MeanResidual
from laconic.reducers.scatter_reduce.two_halves import Pattern as Pattern
from laconic.reducers.scatter_reduce.two_halves import TwoHalves as TwoHalves

Legs = Literal["up", "both"]


@dataclass(frozen=True, repr=False)
class ScatterReduce(Reducer):
    """mean = decode(encode(1/N * sum of decoded pieces)), with each piece reduced on a different rank.

    `pattern`, the route to the reducing rank, in equally many bytes: 'direct', to all others at once; 'ring',
    rounded at each of N - 1 hops; 'tree', up binomial trees, rounded at each of log2 N hops. 'ring' and
    'tree' need a codec of fixed size, or with feedback='both' a sparse codec with a density.

    `feedback`, the rounding errors that later steps correct: 'up', those of the first rounding, if the
    pattern is 'direct' and the method has error feedback; 'both', all of them: the error of the average of T
    means is O(1 / T). 'both' needs error feedback and a codec that is safe with it, and 4 bytes for each
    element that a rank reduces. A ring has a larger error than a tree.

    Payload: one message of `codec`, (N - 1) / N of it up and 1 / N down. 'ring' and 'tree' add 4 bytes to
    agree that all gradients are finite, and 8 for each hop's message of a sparse codec.

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


def most_nbytes(codec: Codec, layout: Layout) -> int:
    total = 0
    for entry in layout:
        blocks, rest = divmod(entry.numel, BLOCK)
        cut = blocks * codec.message_nbytes(Segments.whole(BLOCK))
        cut += codec.message_nbytes(Segments.whole(rest)) if rest else 0
        total += max(cut, codec.message_nbytes(Segments.whole(entry.numel)) if entry.numel else 0)
    return total
