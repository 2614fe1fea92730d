"""FastSGD: large entries only, their values as small logarithms, their positions in adaptive widths.

Yang, Chen, Zeng, Gao 2021, arXiv:2112.04291. A reconstruction from the abstract: values as logarithms
quantised to small integers, with a threshold; positions by adaptive fine-grained delta encoding.
"""

from __future__ import annotations

import math

from laconic.codecs.indices.fine_delta import FineDelta
from laconic.codecs.logquant import Logquant
from laconic.codecs.selectors.above_share import LEAST_SHARE, AboveShare
from laconic.codecs.sparse import Sparse
from laconic.core import arguments
from laconic.exchange.method import Method, Route, everything, matrices, method, routes
from laconic.feedback.error_feedback import ErrorFeedback, Momentum
from laconic.reducers.gather import Gather
from laconic.reducers.sum import Sum

MOST = 254


@method(
    paper="Yang et al. 2021, arXiv:2112.04291",
    status="reconstruction",
    sends="the positions and rounded logarithms of the entries that are large relative to the largest",
    examples=("fastsgd()", "fastsgd(base=1.5, floor=4)"),
)
def fastsgd(base: float = 2.0, *, floor: int = 3, momentum: Momentum = "local") -> Method:
    """Per tensor of two dimensions and more (others are summed uncompressed), on each rank:

        x = e + g;   s = max |x|;   q = round(log_base(s / |x|));   keep those with q <= floor
        send s, and of each kept entry its position, its sign and q;   e = x - sign(x) * s * base^-q

    To choose a density, use `topk`. Payload: about k (log2(floor + 2) + log2(n / k) + 3.4) bits for k of n
    entries. The error feedback is ours.

    Args:
        base: Base of the logarithm.
        floor: Largest q that is kept, 0 or more.
        momentum: As for `stc`.

    Raises:
        SpecError: An argument is out of range.

    >>> fastsgd(floor=2)
    fastsgd(floor=2)
    """
    most = highest_floor(Logquant(base))
    arguments.whole("fastsgd: floor", floor, 0, most, f"with base={base} more is under {LEAST_SHARE} of s")
    values = Logquant(base, levels=floor + 1)
    select = AboveShare(values.least_share)
    codec = Sparse(select, values=values, indices=FineDelta())
    return routes(Route(matrices, Gather(codec), ErrorFeedback(momentum=momentum)), Route(everything, Sum()))


def highest_floor(values: Logquant) -> int:
    """Return the largest floor whose entries, at least base^-(floor + 1/2) of the largest, are distinct.

    >>> highest_floor(Logquant(base=2)), highest_floor(Logquant(base=1.1))
    (99, 254)
    """
    return min(MOST, math.floor(-math.log(LEAST_SHARE, values.base) - 0.5))
