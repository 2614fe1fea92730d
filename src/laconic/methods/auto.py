"""Auto: the least compression that the link allows, measured on the spot.

No paper: the policy is ours. The candidates are the dense sum, float16, CGX's reduction in 8 and 4 bits
(Markov et al. 2022, arXiv:2111.08617), the signs of the largest hundredth (STC: Sattler et al. 2019,
arXiv:1903.02891) and the largest thousandth, both with error feedback and SGD's momentum before the exchange
(DGC: Lin et al. 2018, arXiv:1712.01887).
"""

from __future__ import annotations

from collections.abc import Sequence

from laconic.core.errors import SpecError
from laconic.exchange.method import Method, Route, everything, lift, method, routes
from laconic.reducers import Reducer
from laconic.reducers.autotune import CANDIDATES, Autotune

SAFE = CANDIDATES[3]  # 4 bits: sparser ones cost accuracy with momentum in the optimiser
# stc: 0.1 points below dense with SGD's momentum before the exchange, ResNet-9 of 18 epochs (docs/auto.md)
SAFE_WITH_SGD = CANDIDATES[4]


@method(
    paper="-",
    status="own",
    sends="what pays on this link: all of it, half, 8 or 4 bits, or the largest entries",
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
    """Start with dense steps. Then the next lossier candidate alternates with the one in use, and replaces it
    if it saves at least `gain` of a step (a sparse one twice that) with statistical significance: five
    steps of each if the result is clear, 15 at most in a first pass, and in a second pass over the other
    pairs up to 100 of the slower one and 300 of the faster one. A pass ends when two consecutive
    candidates do not pay, except that the first sparse candidate is still tried, or if the exchange takes
    less than `gain` of a step. If an exchange takes more than a second, one or two steps of each suffice.
    All matrices use the candidate found; vectors are always dense. All candidates share one residual,
    which dense or nearly dense steps add in parts no larger than the gradient. The search repeats every
    `every` steps in both directions; among lossier candidates when the exchange takes 1.5 times as long
    as before, and among less lossy ones when it takes 1.5 times less. All ranks decide the same, by the
    slowest rank's seconds. A single rank stays dense.

    While a sparse candidate is tried or used, the momentum of a `torch.optim.SGD` is applied before the
    exchange, and goes back to the optimiser afterwards; other optimisers keep theirs.

    `lossiest`: the lossiest candidate allowed. Default: the last of the given candidates; for the usual ones
    `stc(density=0.01)` if all matrices are in a `torch.optim.SGD` with momentum, else 4 bits, since sparse
    steps cost accuracy if momentum is applied after the exchange (docs/sparse_steps.md). Up to
    `sampled_topk(density=0.001)` is possible, for the slowest links. `pinned`: a candidate to use from the
    first step, for the same bits in each run; nothing is timed. The logger "laconic" reports each decision
    and its reason. Works with any optimiser.

    Payload: that of the candidate in use; memory: 4 bytes per element, 12 with momentum before the exchange.

    >>> auto(gain=0.1)
    auto(gain=0.1)
    """
    if isinstance(candidates, (str, Reducer)) or not isinstance(candidates, Sequence):
        raise SpecError(
            f"auto: candidates must be a list of reducers, codecs or selectors, got {candidates!r}"
        )
    given = tuple(map(_candidate, candidates))
    most, fixed = (None if each is None else _candidate(each) for each in (lossiest, pinned))
    with_sgd = None
    if most is None and given == CANDIDATES:
        most, with_sgd = SAFE, SAFE_WITH_SGD
    return routes(Route(everything, Autotune(given, gain, every, most, fixed, with_sgd)))


def _candidate(piece: Reducer) -> Reducer:
    """Return the reducer that `compress` would make of a piece."""
    if isinstance(piece, Method):
        raise SpecError(f"auto: a candidate must be a reducer, codec or selector, got the method {piece!r}")
    return piece if isinstance(piece, Reducer) else lift(piece).routes[0].reducer
