"""Sparse Adam: the largest entries of Adam's accumulated updates, with a variance that is frozen.

Ours, of two papers: Tang et al. 2021, arXiv:2102.02888 (1-bit Adam), freeze the variance, so that Adam is
linear in its momentum; Lin et al. 2018, arXiv:1712.01887 (DGC), apply momentum before they select, and clear
it where they have sent.
"""

from __future__ import annotations

from laconic.codecs.dense import Dense
from laconic.codecs.indices.golomb import GOLOMB
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.selector import IndexCoding
from laconic.exchange.method import Method, Route, everything, method, routes
from laconic.methods.dgc import dgc
from laconic.optim.frozen_adam import FrozenAdam
from laconic.optim.local import Local
from laconic.reducers import Reducer
from laconic.reducers.dense_first import DenseFirst

DENSE = Dense()


@method(
    paper="after Tang et al. 2021, arXiv:2102.02888, and Lin et al. 2018, arXiv:1712.01887",
    sends="the largest entries of Adam's accumulated updates, and their positions",
    status="reconstruction",
)
def sparse_adam(
    density: float = 0.01,
    *,
    warmup_steps: int | None = None,
    masking: bool = True,
    down: float | None = None,
    values: Codec = DENSE,
    indices: IndexCoding = GOLOMB,
) -> Method:
    """After a warm-up of Adam, v is frozen, and each rank sends the largest entries of its own updates. Per
    tensor of two dimensions and more, on rank i, with D = sqrt(vhat) + eps:

        u = b1 * u + (1 - b1) * g_i / D        r = r + u
        S = top density * n of |r|, by a sampled threshold
        send r[S];                             r[S] = 0,  u[S] = 0
        w = w - lr * (mean of the sent shares + weight decay)

    This is `dgc` with |m| / D, which moves the weights, in place of |m|. u begins as Adam's m / D; `remove()`
    gives the mean of D * u back to Adam. Tensors of one dimension are summed without compression, as in
    `onebit_adam`, of which the rest holds too: the exchange inside `optimizer.step()`, weight decay, v = 0,
    uneven inputs. What a single gradient adds to u never exceeds the bound of Adam's own m / D.

    Needs `torch.optim.Adam` or `AdamW`, with or without amsgrad. Payload after the warm-up: about
    density * n * (32 + log2(1 / density) + 1.5) bits, to each of the N - 1 others; in the warm-up 32 * n
    bits. Memory: 12 bytes per entry of a matrix for r, u and the old r, in addition to Adam's.

    Args:
        density: Share of the entries that is sent, in (0, 1]; default: 0.01.
        warmup_steps: Steps of the warm-up, 1 or more. They should include any rise of the learning rate.
            Default: None, until v has settled, see `laconic.optim.settled_variance`; that takes more than
            1 / (1 - b2) steps, and gradients are averaged inside `optimizer.step()`.
        masking: Whether sent entries are also cleared in u; default: True.
        down: Share of the entries that servers answer, for groups of 16 and more, see `dgc`; default: None,
            every rank receives every message.
        values: Codec of the values; default: dense().
        indices: Coding of the positions; default: golomb().

    Raises:
        SpecError: An argument is outside its range.

    >>> sparse_adam(density=0.02, warmup_steps=400)
    sparse_adam(density=0.02, warmup_steps=400)
    """
    if warmup_steps is not None:
        arguments.whole("sparse_adam: warmup_steps", warmup_steps, 1, hint="they estimate Adam's v")
    inner = dgc(density, masking=masking, down=down, values=values, indices=indices)
    own: Reducer = Local() if warmup_steps is None else DenseFirst(Local(), warmup_steps)
    return routes(Route(everything, own, rule=FrozenAdam(warmup_steps, inner)))
