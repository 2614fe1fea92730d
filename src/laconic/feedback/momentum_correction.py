"""Momentum correction: momentum before the exchange, so that unsent entries accumulate momentum too.

Lin et al. 2018, arXiv:1712.01887 (DGC), section 3. Per tensor, with local gradient g and momentum mu:

    heavy ball   u = mu * u + g           v = v + u
    Nesterov     u = mu * (u + g)         v = v + u + g
    sent = C(v)  v = v - sent             u = 0 where sent (factor masking, against stale momentum)

The optimiser then applies the mean of `sent` without momentum, and adds weight decay. Tensors of other
optimisers than SGD and LARS have plain error feedback.

Local clipping limits the norm of each rank's whole gradient to clip / sqrt(N); the sum then has about the
norm `clip` (see `laconic.exchange.clip`). The authors' release clips each tensor separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.layout import Layout
from laconic.core.spec import Status
from laconic.feedback import BoundFeedback, Feedback, Optimised
from laconic.feedback.memory.contraction import safe_gain
from laconic.feedback.memory.residual import LocalResidual


@dataclass(frozen=True, repr=False)
class MomentumCorrection(Feedback):
    """Velocity u, accumulator v, and v before the current step: three float32 per element.

    On a GPU, a step needs a fourth. The momentum factor is the optimiser's.

    `masking`: clear the velocity of sent entries. `clip`: limit of the global gradient norm, or None.
    `dense_steps`: first steps that are exchanged dense, unclipped and with the optimiser's momentum, whose
    buffers, with any weight decay in them, then become the velocity.

    >>> MomentumCorrection(clip=5.0)
    momentum_correction(clip=5.0)
    """

    paper: ClassVar[str] = "Lin et al. 2018, arXiv:1712.01887"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "synxlin/deep-gradient-compression"

    masking: bool = True
    clip: float | None = None
    dense_steps: int = 0

    def __post_init__(self) -> None:
        arguments.flag("masking", self.masking)
        if self.clip is not None:
            arguments.number("clip", self.clip, above=0, hint="None leaves gradients as they are")
        arguments.whole("dense_steps", self.dense_steps)

    @property
    def warm_at(self) -> int:
        return self.dense_steps

    @property
    def clears_sent(self) -> bool:
        return self.masking

    def clip_at(self, step: int) -> float | None:
        return self.clip if step >= self.dense_steps else None

    def gain(self, codec: Codec | None, layout: Layout) -> float:
        return safe_gain(codec, layout)

    @property
    def local_momentum(self) -> bool:
        return True

    @property
    def needs_optimiser(self) -> bool:
        return True

    def bind(self, layout: Layout, optimised: Optimised, size: int) -> BoundFeedback:
        local = layout.where(lambda entry: optimised.is_local(entry.name))
        return LocalResidual(local, layout, optimised, clears_sent=self.masking, dense_steps=self.dense_steps)
