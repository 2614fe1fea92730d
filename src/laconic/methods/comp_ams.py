"""COMP-AMS: AMSGrad on gradients that are compressed with error feedback.

Li, Karimi, Li 2022, arXiv:2205.05632 [recalled; no public code].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from laconic.codecs.selectors.topk import TopK
from laconic.exchange.method import Method, governed_by, method
from laconic.optim.amsgrad import AMSGrad
from laconic.optim.requires import Requires

TOPK = TopK(density=0.01)


def _fits(optimiser: Optimizer) -> bool:
    adam = isinstance(optimiser, (Adam, AdamW)) and all(group["amsgrad"] for group in optimiser.param_groups)
    return adam or isinstance(optimiser, AMSGrad)


def _build(parameters: list[Tensor], lr: float | None, weight_decay: float) -> Optimizer:
    return AMSGrad(parameters, lr=1e-3 if lr is None else lr, weight_decay=weight_decay)


AMSGRAD = Requires("laconic.optim.AMSGrad, or torch.optim.Adam or AdamW with amsgrad=True", _fits, _build)


@method(
    paper="Li et al. 2022, arXiv:2205.05632",
    sends="the codec's message; by default the largest hundredth",
    status="recalled",
    examples=("comp_ams()", "comp_ams(sign())"),
)
def comp_ams(compressor: Any = TOPK) -> Method:
    """c_i = C(g_i + e_i);   e_i = g_i + e_i - c_i;   AMSGrad steps along the mean of c_i.

    One-dimensional tensors are summed uncompressed. Needs `laconic.optim.AMSGrad`, or Adam or AdamW with
    `amsgrad=True`: sparse gradients make v fluctuate, and only its maximum is a safe scale. Payload: that of
    `compressor`.

    Args:
        compressor: A codec, selector or reducer: by default `topk(density=0.01)`; the paper also has
            `sign()`. An unbiased codec has no feedback, e_i = 0.

    Raises:
        SpecError: `compressor` is something else.

    >>> comp_ams(TopK(density=0.05))
    comp_ams(compressor=topk(density=0.05))
    """
    return governed_by(AMSGRAD, compressor)
