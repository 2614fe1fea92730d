"""Error feedback: the residual of the compression is added to the next gradient.

    x_t = decay * e_t + g_t        sent_t = C(x_t)        e_{t+1} = x_t - sent_t

Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019, arXiv:1901.09847: with omega < 1 the residual stays
bounded and SGD converges as without compression. Codecs with omega >= 1 are refused, or damped (see
`contraction`).

With SGD's momentum mu, g is by default the velocity, as in DGC, and the optimiser adds no momentum:

    heavy ball   u_t = mu * u_{t-1} + g_t           x_t = decay * e_t + u_t
    Nesterov     u_t = mu * (u_{t-1} + g_t)         x_t = decay * e_t + u_t + g_t

    waiting      x_t = x_t + ahead * mu / (1 - mu) * u_t, then u_t = (1 - ahead) * u_t

An entry waits if |decay * e_t| > |u_t| / 4. At constant mu, later steps would add mu / (1 - mu) * u_t: a
share of this is added at once, nothing above mu = 0.98. This rule is ours. `ahead` 0 is DGC without masking.
Papers leave momentum to the optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.layout import Layout
from laconic.core.spec import Status
from laconic.feedback import BoundFeedback, Feedback, Optimised
from laconic.feedback.memory.contraction import safe_gain
from laconic.feedback.memory.residual import LocalResidual
from laconic.feedback.memory.residual import Residual as Residual

Momentum = Literal["local", "optimizer"]
AHEAD = 0.5


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Feedback):
    """Residual memory: one float32 an element. Local momentum needs three, one of them for the velocity.

    `decay` in (0, 1]: share of the old residual that is kept. `damped`: scale an unbiased high-variance codec
    by 1 / (1 + omega) instead of refusing it. `momentum`: "local" (default) applies the momentum of
    `torch.optim.SGD` or LARS before the exchange; "optimizer" leaves it to the optimiser.
    `ahead` in [0, 1]: share of later momentum to add at once; 0 suits codecs that send all entries in part.

    >>> ErrorFeedback(decay=0.9)
    error_feedback(decay=0.9)
    """

    paper: ClassVar[str] = "Karimireddy et al. 2019, arXiv:1901.09847"
    status: ClassVar[Status] = "recalled"

    decay: float = 1.0
    damped: bool = False
    momentum: Momentum = "local"
    ahead: float = AHEAD

    def __post_init__(self) -> None:
        arguments.number("decay", self.decay, above=0, most=1)
        arguments.flag("damped", self.damped)
        arguments.choice("momentum", self.momentum, get_args(Momentum))
        arguments.number("ahead", self.ahead, least=0, most=1)

    @property
    def local_momentum(self) -> bool:
        return self.momentum == "local"

    def gain(self, codec: Codec | None, layout: Layout) -> float:
        return safe_gain(codec, layout, self.damped)

    def bind(self, layout: Layout, optimised: Optimised, size: int) -> BoundFeedback:
        local = layout.where(lambda entry: self.local_momentum and optimised.is_local(entry.name))
        return (
            LocalResidual(local, layout, optimised, self.decay, ahead=self.ahead)
            if len(local)
            else Residual(layout, self.decay)
        )
