"""0/1 Adam: one bit an entry in some steps, nothing at all in the others.

Lu et al. 2022, arXiv:2202.06009 [recalled]; the only widely used release of it is gone.
"""

from __future__ import annotations

from laconic.codecs.sign import Sign
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.optim.local import Local
from laconic.optim.local_adam import LocalAdam
from laconic.optim.rounds import Rounds
from laconic.strategies.method import Method, Route, everything, method, routes

SIGN = Sign()


@method(
    paper="Lu et al. 2022, arXiv:2202.06009",
    sends="the signs of Adam's mean momentum since the last round, in some steps",
    status="recalled",
)
def zero_one_adam(
    freeze_steps: int = 1000,
    *,
    kappa: int = 16,
    double_every: int = 1000,
    longest: int = 16,
    what: Codec = SIGN,
) -> Method:
    """Adam's v is learnt, from dense means, at steps 0, 1, ..., `kappa` of them one step apart, the next
    `kappa` two, and so on; before step `freeze_steps` momentum goes in one bit at all other steps, as in
    1-bit Adam. Then v is frozen and ranks take steps of their own:

        m_i = b1 * m_i + (1 - b1) * g_i        w_i = w_i - lr * m_i / D

    and meet in rounds, first at every step, twice as rarely after every `double_every` steps, `longest`
    steps apart at most. At a round m becomes C(mean of the ranks' mean m_i), with feedback both ways, and w
    what that leads to from the last round's w. Matrices go by C = `what`, vectors as they are.

    Between rounds replicas differ, and so do the ranks' checkpoints; the handle's `remove()` ends with a
    round. Steps are the optimiser's: what a GradScaler skips is none. Needs `torch.optim.Adam` or `AdamW`;
    the rest is as with `onebit_adam`. Payload: about 2 bits a parameter and round.

    >>> zero_one_adam(400, longest=8)
    zero_one_adam(freeze_steps=400, longest=8)
    """
    rounds = Rounds(freeze_steps, kappa, double_every, longest)
    arguments.piece("zero_one_adam: what", what, Codec, "sign()")
    return routes(Route(everything, Local(), rule=LocalAdam(rounds, what)))
