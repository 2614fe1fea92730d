"""Sparse Ternary Compression: of each tensor the largest entries, as positions, signs and one magnitude.

Sattler et al. 2019, arXiv:1903.02891. Verified against the authors' release (felisat/federated-learning).
Differences: entries are chosen as a set of indices, where the release compares with a threshold, which turns
all zeros into values where that is zero, and sends more than k where entries are equal; positions are coded
by Golomb-Rice on the wire, where the release counts what they would take; one-dimensional tensors are summed
as they are.
"""

from __future__ import annotations

from laconic.codecs.indices.golomb import GOLOMB
from laconic.codecs.selectors.topk import TopK
from laconic.codecs.signmean import SignMean
from laconic.codecs.sparse import Sparse
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.selector import IndexCoding
from laconic.feedback.error_feedback import ErrorFeedback
from laconic.reducers.gather import Gather
from laconic.reducers.server import Server
from laconic.reducers.sum import Sum
from laconic.strategies.method import Method, Route, everything, matrices, method, routes


@method(
    paper="Sattler et al. 2019, arXiv:1903.02891",
    status="verified",
    sends="where the largest entries are, their signs and their mean magnitude",
    examples=("stc()", "stc(down=0.0025)"),
)
def stc(density: float = 0.0025, *, down: float | None = None, indices: IndexCoding = GOLOMB) -> Method:
    """Per tensor of two dimensions and more, on each rank:

        x = e + g;   S = top density * n of |x|;   m = mean of |x[S]|
        send S and the signs of x[S], for C(x) = m * sign(x) on S, 0 elsewhere;   e = x - C(x)

    `down` None: every rank gets every message, and averages. `down` a density: the tensor's server averages
    the messages, and answers with C of that density and an error feedback of its own, as the paper's server
    does. Tensors of one dimension are summed as they are. Payload: about k (log2(1 / density) + 2.5) bits and
    32, k = density * n, each way: 10.1 + 1 bits an entry of 1/400, 1,150 times less than float32. `indices`:
    where large entries come in clusters, `fine_delta()` is shorter.

    Every rank takes every step here. For federated training, where some are absent, a server would keep sums
    of its last answers for those that come back; this is the answer's place, `server`, and not this file's.

    >>> stc(density=0.01, down=0.02)
    stc(density=0.01, down=0.02)
    """
    if down is not None:
        arguments.number("stc: down", down, above=0, most=1, way_out="None sends every message to every rank")
    up = ternary_of(density, indices)
    reducer = Gather(up) if down is None else Server(up, ternary_of(down, indices))
    return routes(Route(matrices, reducer, ErrorFeedback()), Route(everything, Sum()))


def ternary_of(density: float, indices: IndexCoding) -> Codec:
    """Top-k, one sign an entry, one magnitude a tensor."""
    return Sparse(TopK(density), values=SignMean(), indices=indices)
