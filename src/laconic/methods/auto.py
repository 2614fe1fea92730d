"""Auto: the least compression that the link allows, measured on the spot, bucket by bucket.

No paper: the policy is ours. What it chooses among are the dense sum, float16, CGX's reduction in 8 and 4
bits (Markov et al. 2022, arXiv:2111.08617) and the largest hundredth or thousandth with error feedback (Lin
et al. 2018, arXiv:1712.01887).
"""

from __future__ import annotations

from collections.abc import Sequence

from laconic.core.errors import SpecError
from laconic.reducers.ladder import RUNGS, Ladder
from laconic.reducers.reducer import Reducer
from laconic.strategies.method import Method, Route, everything, lift, method, routes


@method(
    paper="-",
    status="-",
    sends="what pays on this link: all of it, half, 8 or 4 bits, or the largest entries, bucket by bucket",
    examples=("auto(slack=0.1)",),
)
def auto(rungs: Sequence[Reducer] = RUNGS, *, slack: float = 0.05, every: int = 1000) -> Method:
    """Each of `rungs` is tried for four steps, from the one that sends least; then every bucket takes the
    one that loses least, such that the step takes at most 1 + `slack` times that of the fastest:

        bucket b done = max(ready_b, bucket b - 1 done) + seconds[rung_b][b]        all measured
        step          = rest + last bucket done + drag  <=  (1 + slack) * least

    where drag is what the rungs were seen to take from backward's cores. So what hides behind the backward
    pass is not compressed, and on a fast link nothing is. What a rung leaves behind is kept and sent later,
    also by the next rung. When the exchange takes half as long again as it did, or less by as much, and every
    `every` steps, all are tried anew. Ranks decide alike, by the slowest one's seconds; the logger "laconic"
    says what and why. Any optimiser takes the mean.

    Payload: that of the rungs taken; memory: 4 bytes an element.

    >>> auto(slack=0.1)
    auto(slack=0.1)
    """
    if isinstance(rungs, (str, Reducer)) or not isinstance(rungs, Sequence):
        raise SpecError(f"auto: rungs are a list of reducers, codecs or selectors, got {rungs!r}")
    return routes(Route(everything, Ladder(tuple(map(_rung, rungs)), slack, every)))


def _rung(piece: Reducer) -> Reducer:
    """The reducer that `compress` would make of a piece."""
    if isinstance(piece, Method):
        raise SpecError(f"auto: a rung is a reducer, codec or selector, got the method {piece!r}")
    return piece if isinstance(piece, Reducer) else lift(piece).routes[0].reducer
