"""SketchML: the largest entries, their values in bins of equal count, their positions as short deltas.

Jiang et al. 2018, "SketchML: accelerating distributed machine learning with data sketches", SIGMOD; the
baseline of FastSGD. Verified against the public code (ccchengff/SketchML), for the parts that are here.
"""

from __future__ import annotations

from laconic.codecs.indices.fine_delta import FineDelta
from laconic.codecs.quantile import Quantile
from laconic.codecs.selectors.topk import TopK
from laconic.codecs.sparse import Sparse
from laconic.feedback.error_feedback import ErrorFeedback
from laconic.reducers.gather import Gather
from laconic.reducers.sum import Sum
from laconic.strategies.method import Method, Route, everything, matrices, method, routes


@method(
    paper="Jiang et al. 2018, SIGMOD",
    status="verified",
    sends="where the largest entries are, and which of the bins of equal count each value is in",
    examples=("sketchml(density=0.05, bins=16)",),
)
def sketchml(density: float = 0.01, *, bins: int = 256) -> Method:
    """Per tensor of two dimensions and more, on each rank:

        x = e + g;   S = top density * n of |x|, sorted by x and cut into `bins` bins
        send S, the mean of each bin, and of each entry its bin;   e = x - what was sent

    Differences with the paper, whose gradients are sparse by nature and sent whole: the largest entries are
    chosen, with error feedback for the rest; a bin is its mean, not the middle of its interval; the
    MinMaxSketch, which hashes the bin indices into a smaller table and loses magnitude, is left out; deltas
    have widths of any number of bits. Tensors of one dimension are summed as they are. Payload: about
    k (log2(1 / density) + 2.4 + log2(bins)) + 32 * bins bits, k = density * n.

    >>> sketchml(bins=64)
    sketchml(bins=64)
    """
    codec = Sparse(TopK(density), values=Quantile(bins), indices=FineDelta())
    return routes(Route(matrices, Gather(codec), ErrorFeedback()), Route(everything, Sum()))
