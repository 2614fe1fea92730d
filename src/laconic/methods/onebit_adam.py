"""1-bit Adam: after a warm-up, momentum in one bit an entry, both ways.

Tang et al. 2021, arXiv:2102.02888 [recalled]; the only widely used release of it is gone.
"""

from __future__ import annotations

from laconic.codecs.sign import Sign
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.optim.frozen_adam import FrozenAdam
from laconic.optim.local import Local
from laconic.reducers.dense_first import DenseFirst
from laconic.strategies.method import Method, Route, everything, method, routes

SIGN = Sign()


@method(
    paper="Tang et al. 2021, arXiv:2102.02888",
    sends="the signs of Adam's momentum, and their mean magnitude, up and down",
    status="recalled",
)
def onebit_adam(warmup_steps: int = 1000, what: Codec = SIGN) -> Method:
    """The first `warmup_steps` steps are Adam's. Then v stays as it is, and with C = `what` on rank i:

        m_i = b1 * m + (1 - b1) * g_i       m = C'(mean of C(m_i + e_i) + e')       w = w - lr * m / D

    where e_i and the server's e' keep what C lost, and D = sqrt(vhat) + eps. Up and down by `server`: two
    messages of C a step, whatever the number of ranks. The exchange happens inside `optimizer.step()`, so
    whatever a script does to gradients before it (clipping, accumulation, a GradScaler) is done to this
    rank's own, as in the paper. Weight decay is Adam's or AdamW's. The momentum of tensors of one dimension
    is summed as it is. Two things are ours: m / D never exceeds the bound that Adam's own has, without which
    a v frozen early can blow a training up; and an entry that no gradient reached in the warm-up, whose v is
    zero, rests.

    Needs `torch.optim.Adam` or `AdamW`, with or without amsgrad. The paper warms up for 15 to 25 % of the
    steps [recalled], which should take in any rise of the learning rate. Payload after it: about 2 bits a
    parameter, of which each rank sends one to the servers and its share of the other to everyone.

    >>> onebit_adam(warmup_steps=400)
    onebit_adam(warmup_steps=400)
    """
    arguments.whole("onebit_adam: warmup_steps", warmup_steps, 1, way_out="Adam's v is learnt in them")
    arguments.piece("onebit_adam: what", what, Codec, "sign()")
    rule = FrozenAdam(warmup_steps, what)
    return routes(Route(everything, DenseFirst(Local(), warmup_steps), rule=rule))
