"""1-bit Adam: after a warm-up, momentum in one bit per entry, in both directions.

Tang et al. 2021, arXiv:2102.02888 [recalled]; its only widely used release is gone.
"""

from __future__ import annotations

from laconic.codecs.sign import Sign
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.exchange.method import Method, Route, everything, method, routes
from laconic.optim.frozen_adam import FrozenAdam
from laconic.optim.inner import both_ways
from laconic.optim.local import Local
from laconic.reducers.dense_first import DenseFirst

SIGN = Sign()


@method(
    paper="Tang et al. 2021, arXiv:2102.02888",
    sends="the signs of Adam's momentum, and their mean magnitude, up and down",
    status="recalled",
)
def onebit_adam(warmup_steps: int = 1000, codec: Codec = SIGN) -> Method:
    """The first `warmup_steps` steps are Adam's. Then v is frozen, and with C = `codec` on rank i:

        m_i = b1 * m + (1 - b1) * g_i       m = C'(mean of C(m_i + e_i) + e')       w = w - lr * m / D

    where e_i and the server's e' store the loss of C, and D = sqrt(vhat) + eps. The exchange happens inside
    `optimizer.step()`, so clipping, accumulation or a GradScaler act on this rank's own gradients. The
    momentum of one-dimensional tensors is summed uncompressed. Ours: m / D never exceeds Adam's own bound, as
    training can diverge if v is frozen early; an entry without a gradient in the warm-up (v = 0) does not
    change. For uneven inputs, use `with Join([model, handle])`.

    Needs `torch.optim.Adam` or `AdamW`, also with amsgrad. Payload after the warm-up: about 2 bits per
    parameter, one to the servers, one from them.

    Args:
        warmup_steps: Warm-up steps, 1 or more, with any rise of the learning rate. The paper: 15 to 25 % of
            all steps [recalled].
        codec: C.

    Raises:
        SpecError: An argument is invalid.

    >>> onebit_adam(warmup_steps=400)
    onebit_adam(warmup_steps=400)
    """
    arguments.whole("onebit_adam: warmup_steps", warmup_steps, 1, hint="they estimate Adam's v")
    arguments.piece("onebit_adam: codec", codec, Codec, "sign()")
    rule = FrozenAdam(warmup_steps, both_ways(codec))
    return routes(Route(everything, DenseFirst(Local(), warmup_steps), rule=rule))
