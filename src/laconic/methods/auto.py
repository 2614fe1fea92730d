"""Auto: only as much compression as saves time on this link, measured on the spot.

The policy is ours. Candidates: the dense sum, float16, CGX's reduction in 8 and 4 bits (Markov et al. 2022,
arXiv:2111.08617), the signs of the largest hundredth (STC: Sattler et al. 2019, arXiv:1903.02891) and the
largest thousandth, both with error feedback and SGD's momentum before the exchange (DGC: Lin et al. 2018,
arXiv:1712.01887).
"""

from __future__ import annotations

from collections.abc import Sequence

from laconic.core.errors import SpecError
from laconic.exchange.method import Method, Route, everything, lift, method, routes
from laconic.reducers import Reducer
from laconic.reducers.autotune import CANDIDATES, Autotune

SAFE = CANDIDATES[3]  # 4 bits: the sparse candidates cost accuracy with momentum in the optimiser
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
    if it saves at least `gain` of a step (a sparse one twice that) with statistical significance. A search
    has two passes: the first times 5 to 15 steps of each, the second at most 100 of the slower and 300 of the
    faster one. A pass ends when two consecutive candidates do not pay (the first sparse one is still tried),
    or if the exchange takes less than `gain` of a step. Vectors are always dense. All candidates share one
    residual, which dense or nearly dense steps release gradually, each at most the gradient's norm. The
    search repeats every `every` steps in both directions; among lossier candidates if the exchange takes 1.5
    times as long as before, among less lossy ones if 1.5 times less. All ranks decide the same. A single rank
    stays dense.

    While a sparse candidate is in use, a `torch.optim.SGD`'s momentum is applied before the exchange, then
    handed back; other optimisers keep theirs.

    `lossiest`: the lossiest candidate allowed. Default: the last one given; of the usual ones
    `stc(density=0.01)` if all matrices are in a `torch.optim.SGD` with momentum, else 4 bits, since sparse
    steps then cost accuracy (docs/sparse_steps.md). For the slowest links, it may be up to
    `sampled_topk(density=0.001)`. `pinned`: a candidate for all steps, untimed, for the same bits in each
    run. The logger "laconic" reports each decision.

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
    if isinstance(piece, Method):
        raise SpecError(f"auto: a candidate must be a reducer, codec or selector, got the method {piece!r}")
    return piece if isinstance(piece, Reducer) else lift(piece).routes[0].reducer
