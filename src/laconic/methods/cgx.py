"""CGX: every gradient in a few bits per entry, rounded block by block, in both directions.

Markov, Ramezanikebrya, Alistarh 2022, arXiv:2111.08617. Quantiser, scatter-reduce and filters as in the
release (IST-DASLab/torch_cgx) [V]. Differences: tensors are distinguished from the first step on, not the
third; very large ones are reduced, not dropped; links inside a machine are like others.
"""

from __future__ import annotations

from laconic.codecs.minmax import MinMax, Rounding
from laconic.core import arguments
from laconic.core.layout import Entry, Layout
from laconic.exchange.method import Method, Route, everything, matrices, method, routes
from laconic.reducers import Reducer
from laconic.reducers.scatter_reduce import Pattern, ScatterReduce
from laconic.reducers.scatter_reduce.adaptive_bits import AdaptiveBits
from laconic.reducers.sum import Sum


@method(
    paper="Markov et al. 2022, arXiv:2111.08617",
    status="verified",
    code="IST-DASLab/torch_cgx",
    sends="the position of each entry between the extremes of its block, in a few bits, both ways",
    examples=("cgx()", "cgx(bits=8, rounding='stochastic', pattern='tree')", "cgx(adapt_every=100)"),
)
def cgx(
    bits: int = 4,
    *,
    block: int = 512,
    rounding: Rounding = "nearest",
    pattern: Pattern = "direct",
    min_size: int = 1024,
    adapt_every: int = 0,
) -> Method:
    """Per tensor of at least two dimensions and `min_size` elements, on N ranks:
        C(x) = min + unit * floor((x - min) / unit + r),   unit = (max - min) / (2^bits - 1) of each block
        piece p of the mean = C(1/N * (g_p + sum over ranks r != p of C(g_r))), added up on rank p

    r = 1/2, or with `rounding='stochastic'` uniform in [0, 1). Other tensors are summed uncompressed. There
    is no feedback, so rounding to nearest always loses entries below half a unit: at 2 bits use 'stochastic',
    or `scatter_reduce(minmax(bits=2, block=16), feedback='both')`.

    Payload: bits + 64 / block bits per entry, (N - 1) / N of it up and 1 / N down: 4.125.

    Args:
        bits: Bits per entry, 1 to 8.
        block: Entries that share a minimum and a unit.
        rounding: "nearest" or "stochastic".
        pattern: How ranks exchange pieces, see `scatter_reduce`.
        min_size: Tensors with fewer elements are not compressed.
        adapt_every: Steps between new bits by `adaptive_bits`, 2 to 8: the fewest bytes at the error of
            `bits`. 0: never. Recalled, not checked with code.

    Raises:
        SpecError: An argument is out of range.

    >>> cgx(bits=8)
    cgx(bits=8)
    """
    arguments.whole("cgx: min_size", min_size)
    arguments.whole("cgx: adapt_every", adapt_every)
    reducer: Reducer = ScatterReduce(MinMax(bits, block, rounding), pattern)
    if adapt_every:
        reducer = AdaptiveBits(bits, block, rounding, pattern, adapt_every)

    def is_large(entry: Entry, model: Layout) -> bool:
        return matrices(entry, model) and entry.numel >= min_size

    return routes(Route(is_large, reducer), Route(everything, Sum()))
