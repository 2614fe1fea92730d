"""MAML among agents, of second and first order (Finn et al. 2017, arXiv:1703.03400).

    every round:  g_i = d f_i(P - lr grad f_i(P; support); query) / dP    agent i, through `steps` inner steps
                  P = Adam(P, mean of C(g_i))                             the server

First order takes the query's gradient after the inner steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from laconic.core import arguments
from laconic.federated.meta.descent import Descent
from laconic.federated.meta.learner import Learner
from laconic.federated.meta.tasks import Batch


@dataclass(frozen=True, kw_only=True)
class MetaGradient(Descent):
    """Rounds of meta-gradients, as in `Descent`.

    Args:
        order: 2: MAML; 1: first-order MAML.
    """

    order: Literal[1, 2] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.whole("order", self.order, 1, 2)

    def gradients(self, learner: Learner, start: Tensor, support: Batch, query: Batch) -> Tensor:
        through = learner.meta_gradients if self.order == 2 else learner.first_order
        return through(start, support, query, self.inner_steps, self.inner_lr)
