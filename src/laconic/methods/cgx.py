"""CGX: every gradient in a few bits an entry, rounded bucket by bucket, on the way up and on the way down.

Markov, Ramezanikebrya, Alistarh 2022, arXiv:2111.08617. Quantiser, scatter-reduce and filters as in the
release (IST-DASLab/torch_cgx) [V]. It reports, at 4 bits and buckets of 1024, dense to compressed: ResNet-50
75.8 to 75.9 %, ViT-B 79.2 to 78.6 %, Transformer-XL 22.8 to 22.9 and GPT-2 14.1 to 13.9 in perplexity.
Differences: tensors are told apart by shape and size from the first step on, where the release registers them
in its third; every tensor is reduced, whatever its size (the release drops one that is larger than its fusion
buffer, and what would fill that up); links inside a machine are treated like those between machines.
"""

from __future__ import annotations

from laconic.codecs.minmax import MinMax, Rounding
from laconic.core import arguments
from laconic.core.layout import Entry, Layout
from laconic.reducers.adaptive_bits import AdaptiveBits
from laconic.reducers.reducer import Reducer
from laconic.reducers.scatter_reduce import Pattern, ScatterReduce
from laconic.reducers.sum import Sum
from laconic.strategies.method import Method, Route, everything, matrices, method, routes


@method(
    paper="Markov et al. 2022, arXiv:2111.08617",
    status="verified",
    sends="of each entry its place between the extremes of its bucket, in a few bits, both ways",
    examples=("cgx()", "cgx(bits=8, rounding='stochastic', pattern='tree')", "cgx(adapt_every=100)"),
)
def cgx(
    bits: int = 4,
    *,
    bucket: int = 512,
    rounding: Rounding = "nearest",
    pattern: Pattern = "direct",
    min_size: int = 1024,
    adapt_every: int = 0,
) -> Method:
    """Per tensor of two dimensions and more, and of `min_size` elements and more, on N ranks:

        C(x) = min + unit * floor((x - min) / unit + r),   unit = (max - min) / (2^bits - 1) of each bucket
        piece p of the mean = C(1/N * (g_p + sum over ranks r != p of C(g_r))), added up on rank p

    r = 1/2, or with `rounding='stochastic'` uniform in [0, 1). `pattern`: how the pieces come together, see
    `scatter_reduce`. Other tensors are summed as they are. Any optimiser takes the mean.

    No feedback, as in the release. To nearest, what is below half a unit is lost whenever it is: at 4 bits a
    unit is small beside a short bucket's extremes, and the release reports no loss; at 2 bits take
    'stochastic', or `error_fed(scatter_reduce(minmax(bits=2, bucket=16)))`.

    `adapt_every` so many steps, where it is not 0, tensors get 2 to 8 bits each, as `adaptive_bits` says: the
    fewest bytes at the error that `bits` for all would have. That part is recalled, not checked against code.

    Payload: bits + 64 / bucket bits an entry, of which (N - 1) / N goes up and 1 / N down: 4.125.

    >>> cgx(bits=8)
    cgx(bits=8)
    """
    arguments.whole("cgx: min_size", min_size)
    arguments.whole("cgx: adapt_every", adapt_every)
    reducer: Reducer = ScatterReduce(MinMax(bits, bucket, rounding), pattern)
    if adapt_every:
        reducer = AdaptiveBits(bits, bucket, rounding, pattern, adapt_every)

    def is_large(entry: Entry, model: Layout) -> bool:
        return matrices(entry, model) and entry.numel >= min_size

    return routes(Route(is_large, reducer), Route(everything, Sum()))
