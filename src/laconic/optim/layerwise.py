"""Base of LARS and LAMB: trust ratios scale each tensor's step with the norm of its weights.

Where weights or update have norm 0 the ratio is 1, so that zeros can move.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.core import arguments
from laconic.optim.per_tensor import CheckedOptimizer

Tensors = list[Tensor]


class Layerwise(CheckedOptimizer):
    """Base that updates tensors of one kind, device and dtype together."""

    @abstractmethod
    def update_(
        self,
        ws: Tensors,
        gs: Tensors,
        states: Sequence[dict[str, Any]],
        group: Mapping[str, Any],
        adapt: bool,
    ) -> None:
        """Update `ws` by gradients `gs`, which must not change. Complex ones come as pairs of reals.

        `adapt`: whether they have a trust ratio and weight decay.
        """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        least_dim = param_group.get("least_dim", self.defaults["least_dim"])
        arguments.whole("least_dim", least_dim, hint="2 leaves vectors out, 0 leaves none out")
        super().add_param_group(param_group)

    def update_group_(self, ws: Tensors, group: Mapping[str, Any]) -> None:
        kinds: dict[tuple[bool, torch.device, torch.dtype], Tensors] = {}
        for w in ws:
            kinds.setdefault((adapted(w, group), w.device, w.dtype), []).append(w)
        for (adapt, *_), alike in kinds.items():
            gs = [real(w.grad) for w in alike if w.grad is not None]
            self.update_([real(w) for w in alike], gs, [self.state[w] for w in alike], group, adapt)


def adapted(w: Tensor, group: Mapping[str, Any]) -> bool:
    """Return whether this tensor has a trust ratio and weight decay.

    >>> adapted(torch.zeros(3, 4), {"least_dim": 2}), adapted(torch.zeros(3), {"least_dim": 2})
    (True, False)
    """
    return w.dim() >= int(group["least_dim"])


def trust_ratios(numerators: Tensors, denominators: Tensors, scale: float = 1.0) -> Tensors:
    """Return scale * a / b for each pair of norms, 1 where one of them is 0.

    >>> a, b = [torch.tensor(2.0), torch.tensor(0.0)], [torch.tensor(4.0), torch.tensor(1.0)]
    >>> [ratio.item() for ratio in trust_ratios(a, b, scale=0.5)]
    [0.25, 1.0]
    """
    over, under = torch.stack(numerators), torch.stack(denominators)
    one = torch.ones_like(over)
    return list(torch.where((over > 0) & (under > 0), scale * over / under, one).unbind())


def norms(tensors: Tensors) -> Tensors:
    """Return Euclidean norms; float32 for 16-bit tensors, as float16 ends at 65,504."""
    single = tensors[0].dtype in (torch.float16, torch.bfloat16) if tensors else False
    return list(torch._foreach_norm(tensors, dtype=torch.float32) if single else torch._foreach_norm(tensors))


def real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x
