"""Deep Hierarchy Quantization Compression: the largest entries, their magnitudes in a few groups by size.

Jiang et al. 2022, arXiv:2212.14760. A reconstruction from the abstract. Its dynamic sampling of clients:
`laconic.federated.samplings`.
"""

from __future__ import annotations

from laconic.codecs.adaptive_hierarchy import AdaptiveHierarchy
from laconic.codecs.hierarchy import Hierarchy
from laconic.codecs.indices.golomb import GOLOMB
from laconic.codecs.selectors.topk import TopK
from laconic.codecs.sparse import Sparse
from laconic.core import arguments
from laconic.core.selector import IndexCoding
from laconic.exchange.method import Method, Route, everything, matrices, method, routes
from laconic.feedback.error_feedback import ErrorFeedback, Momentum
from laconic.reducers.gather import Gather
from laconic.reducers.server import Server
from laconic.reducers.sum import Sum


@method(
    paper="Jiang et al. 2022, arXiv:2212.14760",
    status="reconstruction",
    sends="the positions and signs of the largest entries, and the number of each one's magnitude group",
    examples=(
        "dhqc(density=0.05)",
        "dhqc(density=0.05, down=0.1)",
        "dhqc(density=0.05, levels=16, error=0.02)",
    ),
)
def dhqc(
    density: float = 0.01,
    *,
    levels: int = 4,
    error: float | None = None,
    down: float | None = None,
    indices: IndexCoding = GOLOMB,
    momentum: Momentum = "local",
) -> Method:
    """Per tensor of two dimensions and more (others are summed uncompressed), on each rank:

        x = e + g;   S = top density * n of |x|, sorted and cut into `levels` groups of equal count
        send S, the mean of |x| in each group, and the sign and the group of each entry
        C(x) = sign(x) * mean of its group on S, 0 elsewhere;   e = x - C(x)

    With one level this is `stc(density)`, bit for bit. Payload: about k (log2(1 / density) + 2.5 +
    log2(levels)) + 32 * levels bits, k = density * n, each way.

    Args:
        density: Share of entries sent, in (0, 1].
        levels: Number of groups. With `error`, the maximum.
        error: Each tensor gets 1, 2, 4, ... groups, until the squared error of its sent entries is at most
            this share; one more byte per tensor gives their number. None: always `levels`.
        down: Density of the server's answer, which has its own error feedback. None: each rank sends to all
            others.
        indices: Coding of the positions; `fine_delta()` for clustered entries.
        momentum: As for `stc`.

    Raises:
        SpecError: An argument is out of range.

    >>> dhqc(levels=2)
    dhqc(levels=2)
    """
    if down is not None:
        arguments.number("dhqc: down", down, above=0, most=1, hint="None sends every message to every rank")
    values = Hierarchy(levels) if error is None else AdaptiveHierarchy(error, levels)
    up = Sparse(TopK(density), values=values, indices=indices)
    reducer = Gather(up) if down is None else Server(up, Sparse(TopK(down), values=values, indices=indices))
    return routes(Route(matrices, reducer, ErrorFeedback(momentum=momentum)), Route(everything, Sum()))
