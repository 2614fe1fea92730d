"""QRDA AdaGrad: AdaGrad with regularised dual averaging on quantised gradients, for sparse models.

Xu et al. 2022, arXiv:2208.05631, from the abstract; the update is derived from Duchi et al. 2011 [recalled].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.optim.prox import shrink
from laconic.optim.regularised_adagrad import RegularisedAdaGrad


class QRDAAdaGrad(RegularisedAdaGrad):
    """Regularised dual averaging, with g the mean of the quantised gradients, and sums over all steps:

        s = s + g^2        H = delta + sqrt(s)        a = a + lr * g        c = c + lr
        z = w_1 - a / H
        w = argmin  1/2 sum_j H_j (w_j - z_j)^2 + c * (l1 * |w|_1  or  l2 * sum over rows of |row|_2)

    The prox-centre is w_1, the first weights: with zero, all layers would vanish. Without a regulariser it is
    lazy AdaGrad. Entries whose gradients were always zero do not change. State: three tensors per parameter.

    Args:
        params, lr, l1, l2, delta: As for `QCMDAdaGrad`.

    Raises:
        SpecError: A setting is outside its range, or a group has both l1 and l2.

    >>> w = torch.nn.Parameter(torch.tensor([1.0, 0.105]))
    >>> w.grad = torch.tensor([0.5, 0.5])
    >>> optimizer = QRDAAdaGrad([w], lr=0.1, l1=0.1)
    >>> optimizer.step()
    >>> [round(value, 4) for value in w.tolist()], optimizer.zero_share()
    ([0.88, 0.0], 0.5)
    """

    def update_(self, w: Tensor, g: Tensor, group: Mapping[str, Any]) -> None:
        state, lr = self.state[w], group["lr"]
        if not state:
            state["rates"] = 0.0  # loading would cast a tensor to the weights' dtype
            state["sum"] = torch.zeros_like(w)
            state["dual"] = torch.zeros_like(w)
            state["start"] = w.detach().clone()
        c = state["rates"] = state["rates"] + lr
        seen = state["sum"].addcmul_(g, g)
        h = seen.sqrt().add_(group["delta"])
        z = state["start"] - state["dual"].add_(g, alpha=lr) / h
        w.copy_(torch.where(seen == 0, w, shrink(z, h, c * group["l1"], c * group["l2"])))
