"""Auto: the least compression that the link allows, measured on the spot.

No paper: the policy is ours. The candidates are the dense sum, float16, CGX's reduction in 8 and 4 bits
(Markov et al. 2022, arXiv:2111.08617) and the largest hundredth or thousandth with error feedback (Lin et al.
2018, arXiv:1712.01887).
"""

from __future__ import annotations

from collections.abc import Sequence

from laconic.core.errors import SpecError
from laconic.exchange.method import Method, Route, everything, lift, method, routes
from laconic.reducers import Reducer
from laconic.reducers.autotune import CANDIDATES, Autotune


@method(
    paper="-",
    status="-",
    sends="what pays on this link: all of it, half, 8 or 4 bits, or the largest entries",
    examples=("auto(slack=0.1)",),
)
def auto(candidates: Sequence[Reducer] = CANDIDATES, *, slack: float = 0.05, every: int = 1000) -> Method:
    """The first steps are dense. If the exchange takes more than `slack` of a step, every other candidate is
    in use for five steps, from the one that sends least on, until one takes three times the fastest step. Of
    those whose step takes at most 1 + `slack` times the fastest, the candidate that loses least is kept for
    all matrices; vectors are always dense. What a candidate leaves behind stays in one residual, and the next
    candidate sends it. The search begins again every `every` steps, or when the exchange takes 1.5 times
    more or less time than it did. Ranks decide alike, by the slowest one's seconds.

    The logger "laconic" says what is decided and why. Any optimiser takes the mean.

    Payload: that of the candidate kept; memory: 4 bytes an element.

    >>> auto(slack=0.1)
    auto(slack=0.1)
    """
    if isinstance(candidates, (str, Reducer)) or not isinstance(candidates, Sequence):
        raise SpecError(f"auto: candidates are a list of reducers, codecs or selectors, got {candidates!r}")
    return routes(Route(everything, Autotune(tuple(map(_candidate, candidates)), slack, every)))


def _candidate(piece: Reducer) -> Reducer:
    """The reducer that `compress` would make of a piece."""
    if isinstance(piece, Method):
        raise SpecError(f"auto: a candidate is a reducer, codec or selector, got the method {piece!r}")
    return piece if isinstance(piece, Reducer) else lift(piece).routes[0].reducer
