"""QCMD AdaGrad: AdaGrad with composite mirror descent on quantised gradients, for sparse models.

Xu et al. 2022, arXiv:2208.05631, from the abstract; the update is derived from Duchi et al. 2011 [recalled].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.optim.prox import shrink
from laconic.optim.regularised_adagrad import RegularisedAdaGrad


class QCMDAdaGrad(RegularisedAdaGrad):
    """Composite mirror descent, with g the mean of the quantised gradients:

        s = s + g^2        H = delta + sqrt(s)        z = w - lr * g / H
        w = argmin  1/2 sum_j H_j (w_j - z_j)^2 + lr * (l1 * |w|_1  or  l2 * sum over rows of |row|_2)

    l1 makes single weights exactly zero, l2 whole rows; without either it is AdaGrad. Entries whose gradients
    were always zero do not change: H would be delta there, and a sparse quantiser would erase them. To exempt
    biases, put them in a group with l1=0. State: one tensor per parameter.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate, 0 or more.
        l1: Weight of the l1 norm, 0 or more.
        l2: Weight of the row norms, 0 or more. A group may have l1 or l2, not both.
        delta: Added to the root in H, above 0.

    Raises:
        SpecError: A setting is outside its range, or a group has both l1 and l2.

    >>> w = torch.nn.Parameter(torch.tensor([1.0, 0.001]))
    >>> w.grad = torch.tensor([0.5, 0.5])
    >>> optimizer = QCMDAdaGrad([w], lr=0.1, l1=0.1)
    >>> optimizer.step()
    >>> [round(value, 4) for value in w.tolist()], optimizer.zero_share()
    ([0.88, -0.079], 0.0)
    """

    def update_(self, w: Tensor, g: Tensor, group: Mapping[str, Any]) -> None:
        state, lr = self.state[w], group["lr"]
        if not state:
            state["sum"] = torch.zeros_like(w)
        seen = state["sum"].addcmul_(g, g)
        h = seen.sqrt().add_(group["delta"])
        z = w - lr * g / h
        w.copy_(torch.where(seen == 0, w, shrink(z, h, lr * group["l1"], lr * group["l2"])))
