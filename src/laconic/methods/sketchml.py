"""SketchML: the largest entries, their values in bins of equal count, their positions as short deltas.

Jiang et al. 2018, "SketchML: accelerating distributed machine learning with data sketches", SIGMOD; the
baseline of FastSGD. Partial: its quantile bins and its deltas are here, verified against the public code
(ccchengff/SketchML); its MinMaxSketch is not.
"""

from __future__ import annotations

from laconic.codecs.indices.fine_delta import FineDelta
from laconic.codecs.quantile import Quantile
from laconic.codecs.selectors.topk import TopK
from laconic.codecs.sparse import Sparse
from laconic.exchange.method import Method, Route, everything, matrices, method, routes
from laconic.feedback.error_feedback import ErrorFeedback
from laconic.reducers.gather import Gather
from laconic.reducers.sum import Sum


@method(
    paper="Jiang et al. 2018, SIGMOD",
    status="partial",
    code="ccchengff/SketchML",
    sends="the positions of the largest entries, and each value's bin among bins of equal count",
    examples=("sketchml(density=0.05, bins=16)",),
)
def sketchml(density: float = 0.01, *, bins: int = 256) -> Method:
    """Per tensor of two dimensions and more, on each rank:

        x = e + g;   S = top density * n of |x|, sorted by x and cut into `bins` bins
        send S, the mean of each bin, and the bin of each entry;   e = x - what was sent

    Differences to the paper, whose gradients are sparse and sent whole: the largest entries are chosen, with
    error feedback for the rest; a bin is its mean, not the middle of its interval; the MinMaxSketch, which
    hashes the bin indices into a smaller table and loses magnitude, is left out; deltas may have any number
    of bits. Tensors of one dimension are summed without compression. Payload: about
    k (log2(1 / density) + 2.4 + log2(bins)) + 32 * bins bits, k = density * n.

    Args:
        density: Share of the entries that is sent, in (0, 1]; default: 0.01.
        bins: Number of bins; default: 256.

    Raises:
        SpecError: An argument is outside its range.

    >>> sketchml(bins=64)
    sketchml(bins=64)
    """
    codec = Sparse(TopK(density), values=Quantile(bins), indices=FineDelta())
    return routes(Route(matrices, Gather(codec), ErrorFeedback()), Route(everything, Sum()))
