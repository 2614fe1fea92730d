"""COMP-AMS: AMSGrad on gradients that are compressed with error feedback.

Li, Karimi, Li 2022, arXiv:2205.05632. No public code was at hand; the algorithm is the standard one of the
paper [recalled]. All moments stay behind the mean, so they are equal on all ranks and need no server.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from laconic.codecs.selectors.topk import TopK
from laconic.optim.amsgrad import AMSGrad
from laconic.optim.asks import Asks
from laconic.strategies.method import Method, governed_by, method

TOPK = TopK(density=0.01)


def _fits(optimiser: Optimizer) -> bool:
    adam = isinstance(optimiser, (Adam, AdamW)) and all(group["amsgrad"] for group in optimiser.param_groups)
    return adam or isinstance(optimiser, AMSGrad)


def _build(parameters: list[Tensor], lr: float | None, weight_decay: float) -> Optimizer:
    return AMSGrad(parameters, lr=1e-3 if lr is None else lr, weight_decay=weight_decay)


AMSGRAD = Asks("laconic.optim.AMSGrad, or torch.optim.Adam or AdamW with amsgrad=True", _fits, _build)


@method(
    paper="Li et al. 2022, arXiv:2205.05632",
    sends="what the codec in it sends; by default the largest hundredth",
    status="recalled",
    examples=("comp_ams()", "comp_ams(sign())"),
)
def comp_ams(what: Any = TOPK) -> Method:
    """c_i = C(g_i + e_i);   e_i = g_i + e_i - c_i;   AMSGrad steps along the mean of c_i.

    `what`: a codec, selector or reducer, such as `topk(density=0.01)` or `sign()`, the two of the paper;
    `dense()` is AMSGrad on the exact mean, and with an unbiased codec there is no feedback, e_i = 0. Tensors
    of one dimension are summed as they are. Needs `laconic.optim.AMSGrad`, or Adam or AdamW with
    `amsgrad=True`: sparse gradients make v lumpy, and only its maximum is a safe scale. Payload: that of
    `what`.

    >>> comp_ams(TopK(density=0.05))
    comp_ams(what=topk(density=0.05))
    """
    return governed_by(AMSGRAD, what)
