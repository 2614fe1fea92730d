"""Sparse Adam: the entries of the momentum that move the weights most, with a variance that is frozen.

After Tang et al. 2021, arXiv:2102.02888 (1-bit Adam), and Sattler et al. 2019, arXiv:1903.02891 (STC), who
send the signs of the largest entries.
"""

from __future__ import annotations

from laconic.codecs.indices.golomb import GOLOMB
from laconic.codecs.selectors.topk import TopK
from laconic.codecs.signmean import SignMean
from laconic.codecs.sparse import Sparse
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.selector import IndexCoding
from laconic.exchange.method import Method, Route, everything, matrices, method, routes
from laconic.feedback.error_feedback import ErrorFeedback
from laconic.optim.frozen_adam import FrozenAdam
from laconic.optim.local import Local
from laconic.reducers import Reducer
from laconic.reducers.dense_first import DenseFirst
from laconic.reducers.gather import Gather
from laconic.reducers.server import Server
from laconic.reducers.sum import Sum

SIGNS = SignMean()


@method(
    paper="after Tang et al. 2021, arXiv:2102.02888",
    sends="the positions and signs of the largest entries of Adam's update, and their mean magnitude",
    status="reconstruction",
    examples=("sparse_adam(warmup_steps=400)",),
)
def sparse_adam(
    density: float = 0.1,
    *,
    warmup_steps: int | None = None,
    down: float | None = None,
    values: Codec = SIGNS,
    indices: IndexCoding = GOLOMB,
) -> Method:
    """After a warm-up of Adam, v is frozen. Per tensor of two dimensions and more, on rank i, with D =
    sqrt(vhat) + eps:

        x = e + (b1 * m + (1 - b1) * g_i) / D        S = top density * n of |x|        e = x - C(x)
        send C(x): S, the signs of x[S], and their mean magnitude
        m = D * mean of C(x) over ranks              w = w - lr * m / D

    The rest is as in `onebit_adam`.

    Needs `torch.optim.Adam` or `AdamW`, also with amsgrad. Payload after the warm-up: about density * n *
    (log2(1 / density) + 2.5) bits, to each of the N - 1 others; in the warm-up 32 * n bits. Memory: 4 bytes
    per entry of a matrix, in addition to Adam's; during a step 4 buffers as large as the gradient. Error of a
    message: omega <= 1 - 1 / n.

    Args:
        density: Share of entries sent, in (0, 1].
        warmup_steps: Warm-up steps, 1 or more, with any rise of the learning rate. None: until v has settled
            (`laconic.optim.settled_variance`), after more than 1 / (1 - b2) steps; gradients are averaged
            inside `optimizer.step()`.
        down: Share of entries that a tensor's server answers, with its own feedback (see `server`), for 16
            ranks and more. None: every rank receives every message.
        values: Codec of the values.
        indices: Coding of the positions.

    Raises:
        SpecError: An argument is out of range.

    >>> sparse_adam(density=0.05, warmup_steps=400)
    sparse_adam(density=0.05, warmup_steps=400)
    """
    if warmup_steps is not None:
        arguments.whole("sparse_adam: warmup_steps", warmup_steps, 1, hint="they estimate Adam's v")
    if down is not None:
        arguments.number(
            "sparse_adam: down", down, above=0, most=1, hint="None sends every message to every rank"
        )
    up = Sparse(TopK(density), values=values, indices=indices)
    reducer: Reducer = Gather(up)
    if down is not None:
        reducer = Server(up, Sparse(TopK(down), values=values, indices=indices))
    compressed = Route(matrices, reducer, ErrorFeedback(momentum="optimizer"))
    inner = Method(repr(reducer), (compressed, Route(everything, Sum())))
    own: Reducer = Local() if warmup_steps is None else DenseFirst(Local(), warmup_steps)
    return routes(Route(everything, own, rule=FrozenAdam(warmup_steps, inner, scaled=True)))
