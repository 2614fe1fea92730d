"""0/1 Adam: one bit per entry in some steps, nothing in the others.

Lu et al. 2022, arXiv:2202.06009 [recalled]; its only widely used release is gone.
"""

from __future__ import annotations

from laconic.codecs.sign import Sign
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.exchange.method import Method, Route, everything, method, routes
from laconic.optim.local import Local
from laconic.optim.local_adam import LocalAdam
from laconic.optim.rounds import Rounds

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
    codec: Codec = SIGN,
) -> Method:
    """Adam's v is estimated from dense means, at growing intervals; other steps send momentum in one bit.

    From step `freeze_steps` on, v is frozen, and ranks do local steps:

        m_i = b1 * m_i + (1 - b1) * g_i        w_i = w_i - lr * m_i / D

    with rounds at growing intervals. At a round m becomes C(mean of the ranks' mean m_i), with feedback both
    ways, and w follows from it and the last round's w. Vectors are not compressed.

    Between rounds replicas and checkpoints differ; the handle's `remove()` ends with a round. Steps skipped
    by a GradScaler do not count. Needs `torch.optim.Adam` or `AdamW`; the rest is as in `onebit_adam`.
    Payload: about 2 bits per parameter and round.

    Args:
        freeze_steps: The step from which v is frozen, 1 or more.
        kappa: v is updated `kappa` times one step apart, then `kappa` times two steps apart, and so on.
        double_every: Steps after which the distance of rounds doubles.
        longest: Largest distance of rounds, in steps.
        codec: C, for matrices.

    Raises:
        SpecError: An argument is invalid.

    >>> zero_one_adam(400, longest=8)
    zero_one_adam(freeze_steps=400, longest=8)
    """
    rounds = Rounds(freeze_steps, kappa, double_every, longest)
    arguments.piece("zero_one_adam: codec", codec, Codec, "sign()")
    return routes(Route(everything, Local(), rule=LocalAdam(rounds, codec)))
