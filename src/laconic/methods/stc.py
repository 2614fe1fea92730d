"""Sparse Ternary Compression: the largest entries of each tensor, as positions, signs and one magnitude.

Sattler et al. 2019, arXiv:1903.02891. Verified against the authors' release (felisat/federated-learning).
Differences: exactly k entries are chosen, also if some are equal; positions are Golomb-Rice coded on the
wire (the release only counts their bits); vectors are dense.
"""

from __future__ import annotations

from laconic.codecs.indices.golomb import GOLOMB
from laconic.codecs.selectors.topk import TopK
from laconic.codecs.signmean import SignMean
from laconic.codecs.sparse import Sparse
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.selector import IndexCoding
from laconic.exchange.method import Method, Route, everything, matrices, method, routes
from laconic.feedback.error_feedback import ErrorFeedback, Momentum
from laconic.reducers.gather import Gather
from laconic.reducers.server import Server
from laconic.reducers.sum import Sum


@method(
    paper="Sattler et al. 2019, arXiv:1903.02891",
    status="verified",
    code="felisat/federated-learning",
    sends="the positions and signs of the largest entries, and their mean magnitude",
    examples=("stc()", "stc(down=0.0025)"),
)
def stc(
    density: float = 0.0025,
    *,
    down: float | None = None,
    indices: IndexCoding = GOLOMB,
    momentum: Momentum = "local",
) -> Method:
    """Per tensor of two dimensions and more, on each rank:

        x = e + g;   S = top density * n of |x|;   m = mean of |x[S]|
        send S and the signs of x[S], for C(x) = m * sign(x) on S, 0 elsewhere;   e = x - C(x)

    Payload: about k (log2(1 / density) + 2.5) bits and 32, k = density * n, each way, by default 1/1150 of
    the gradient.

    Args:
        density: Share of entries sent, in (0, 1].
        down: Density of the server's answer, which has its own error feedback, as in the paper. None: each
            rank sends to all others.
        indices: Coding of the positions; `fine_delta()` for clustered entries.
        momentum: "local": the momentum of SGD or LARS is applied before compression (see
            `error_feedback`); "optimizer": the optimiser applies it, as in the paper.

    Raises:
        SpecError: An argument is out of range.

    >>> stc(density=0.01, down=0.02)
    stc(density=0.01, down=0.02)
    """
    if down is not None:
        arguments.number("stc: down", down, above=0, most=1, hint="None sends every message to every rank")
    up = ternary_of(density, indices)
    reducer = Gather(up) if down is None else Server(up, ternary_of(down, indices))
    return routes(Route(matrices, reducer, ErrorFeedback(momentum=momentum)), Route(everything, Sum()))


def ternary_of(density: float, indices: IndexCoding) -> Codec:
    return Sparse(TopK(density), values=SignMean(), indices=indices)
