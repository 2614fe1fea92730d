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

SAFE = CANDIDATES[3]  # 4 bits: what is sparser costs accuracy under many an optimiser's momentum


@method(
    paper="-",
    status="-",
    sends="what pays on this link: all of it, half, 8 or 4 bits; if allowed, the largest entries",
    examples=("auto(gain=0.1)", "auto(lossiest=sampled_topk(density=0.001))"),
)
def auto(
    candidates: Sequence[Reducer] = CANDIDATES,
    *,
    gain: float = 0.05,
    every: int = 1000,
    lossiest: Reducer | None = None,
    pinned: Reducer | None = None,
) -> Method:
    """The first steps are dense. Then the next lossier candidate is timed in turns with the one in use, and
    it is kept if it saves at least `gain` of a step, a sparse one twice that, and by more than chance: five
    steps of each where that is plain, up to 100 where steps differ much. So it goes on, until two candidates
    running do not pay, or the exchange is less than `gain` of a step. Where an exchange takes more than a
    second, one or two steps of each are enough. All matrices take the candidate that is kept; vectors are
    always dense. What others left behind stays in one residual, and dense or nearly dense steps add it in
    parts no larger than the gradient. It looks again, both ways, every `every` steps; when the exchange takes
    1.5 times as long as it did, among the lossier ones; when it takes so much less, among the less lossy.
    Ranks decide alike, by the slowest one's seconds.

    `lossiest`: a candidate beyond which it never goes; default: 4 bits, or the last of the candidates that
    are given. Up to `sampled_topk(density=0.001)` it sends the largest entries alone, for the slowest links:
    where the optimiser's momentum comes after the exchange that costs accuracy (docs/sparse_steps.md), and
    `dgc`, with momentum of its own, keeps it. `pinned`: a candidate that is in use from the first step on,
    for the same bits in each run; nothing is timed. The logger "laconic" says what is decided and why. Any
    optimiser takes the mean.

    Payload: that of the candidate kept; memory: 4 bytes an element.

    >>> auto(gain=0.1)
    auto(gain=0.1)
    """
    if isinstance(candidates, (str, Reducer)) or not isinstance(candidates, Sequence):
        raise SpecError(f"auto: candidates are a list of reducers, codecs or selectors, got {candidates!r}")
    given = tuple(map(_candidate, candidates))
    most, fixed = (None if each is None else _candidate(each) for each in (lossiest, pinned))
    if most is None and given == CANDIDATES:
        most = SAFE
    return routes(Route(everything, Autotune(given, gain, every, most, fixed)))


def _candidate(piece: Reducer) -> Reducer:
    """The reducer that `compress` would make of a piece."""
    if isinstance(piece, Method):
        raise SpecError(f"auto: a candidate is a reducer, codec or selector, got the method {piece!r}")
    return piece if isinstance(piece, Reducer) else lift(piece).routes[0].reducer
