"""SketchML: the largest entries, their values in bins of equal count, their positions as short deltas.

Jiang et al. 2018, "SketchML: accelerating distributed machine learning with data sketches", SIGMOD. Verified
against the public code (ccchengff/SketchML): quantile bins, deltas, and the grouped MinMaxSketch.
"""

from __future__ import annotations

from laconic.codecs.indices.fine_delta import FineDelta
from laconic.codecs.minmax_sketch import MinmaxSketch
from laconic.codecs.quantile import Quantile
from laconic.codecs.selectors.topk import TopK
from laconic.codecs.sparse import Sparse
from laconic.exchange.method import Method, Route, everything, matrices, method, routes
from laconic.feedback.error_feedback import ErrorFeedback, Momentum
from laconic.reducers.gather import Gather
from laconic.reducers.sum import Sum


@method(
    paper="Jiang et al. 2018, SIGMOD",
    status="partial",
    code="ccchengff/SketchML",
    sends="the positions of the largest entries, and each value's bin among bins of equal count",
    examples=("sketchml(density=0.05, bins=16)", "sketchml(density=0.05, bins=64, groups=8)"),
)
def sketchml(
    density: float = 0.01, *, bins: int = 256, groups: int | None = None, momentum: Momentum = "local"
) -> Method:
    """Per tensor of two dimensions and more (others are summed uncompressed), on each rank:

        x = e + g;   S = top density * n of |x|, sorted by x and cut into `bins` bins
        send S, the mean of each bin, and the bin of each entry;   e = x - sent share

    Differences from the paper, whose gradients are sparse: the largest entries are chosen, with error
    feedback; a bin is its mean, not its middle. Payload: about k (log2(1 / density) + 2.4 + log2(bins)) + 32
    * bins bits, k = density * n: for a few hundred sent entries use fewer bins.

    With `groups` the bins are sent in the paper's MinMaxSketch (`minmax_sketch`): log2(groups) + 0.6
    log2(bins / groups) bits per value instead of log2(bins). Plain bins have its error with fewer bits
    (`python -m benchmarks.sketch`).

    Args:
        density: Share of entries sent, in (0, 1].
        bins: Number of bins.
        groups: Groups of bins, each with a sketch and one sign; divides `bins`. 16 is the paper's 8 of both
            signs. None: no sketch.
        momentum: As for `stc`.

    Raises:
        SpecError: An argument is out of range.

    >>> sketchml(bins=64)
    sketchml(bins=64)
    """
    values = Quantile(bins) if groups is None else MinmaxSketch(bins, groups)
    codec = Sparse(TopK(density), values=values, indices=FineDelta())
    return routes(Route(matrices, Gather(codec), ErrorFeedback(momentum=momentum)), Route(everything, Sum()))
