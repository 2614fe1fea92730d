"""Signum: majority vote on the signs of each worker's momentum, one bit per entry, both ways together.

Bernstein, Wang, Azizzadenesheli, Anandkumar 2018, arXiv:1802.04434; Bernstein, Zhao, Azizzadenesheli,
Anandkumar 2019, arXiv:1810.05291. Differences: the median magnitude m, and random ties (see `majority_vote`);
u has torch.optim.SGD's scale.
"""

from __future__ import annotations

from laconic.exchange.method import Method, Route, everything, method, routes
from laconic.feedback.worker_momentum import WorkerMomentum
from laconic.optim.sgd_momentum import SgdMomentum
from laconic.reducers.majority_vote import MajorityVote


@method(
    paper="Bernstein et al. 2019, arXiv:1810.05291",
    status="recalled",
    sends="the signs of the velocity; the majority's signs are returned",
)
def signum() -> Method:
    """Per tensor, on each rank r = 0..N-1, with SGD's momentum mu:

        u_r = mu * u_r + g_r                    (Nesterov: u = mu * (u + g), and u + g is voted on)
        m = median over ranks of mean |u_r|     v = the majority of the ranks' signs, entry by entry
        w = w - lr * (m * v + weight decay)

    All tensors vote: if fewer than half of the ranks are hostile, no step is longer than an honest rank's,
    and entries on which all honest ranks agree follow them. Needs `torch.optim.SGD`; with momentum 0 it is
    signSGD with majority vote. Payload: 1 bit per entry, and 4 bytes per tensor.

    >>> signum()
    signum()
    """
    return routes(Route(everything, MajorityVote(), WorkerMomentum(), SgdMomentum()))
