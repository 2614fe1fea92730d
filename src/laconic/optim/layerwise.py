"""Base of LARS and LAMB: the step of each tensor is as long as its weights say, by a trust ratio.

Tensors with a ratio are updated together, by torch's multi-tensor functions. Which tensors have one is a rule
of the parameter group: those of `least_dim` dimensions and more, 2 by default. So biases, the scales and
shifts of norms and other vectors have neither a trust ratio nor weight decay, as in the published recipes of
both papers. A layer whose weights or update have norm 0 takes the ratio 1, so that weights that start at zero
move.
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
    """Updates tensors of one kind, device and dtype together."""

    @abstractmethod
    def update_(
        self,
        ws: Tensors,
        gs: Tensors,
        states: Sequence[dict[str, Any]],
        group: Mapping[str, Any],
        adapt: bool,
    ) -> None:
        """Update tensors `ws` by gradients `gs`, which may be kept but not changed.

        `adapt`: whether they have a trust ratio and weight decay. Complex tensors come as pairs of reals.
        """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. Raises `SpecError` if a setting is outside its range."""
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
    """Whether this tensor has a trust ratio and weight decay.

    >>> adapted(torch.zeros(3, 4), {"least_dim": 2}), adapted(torch.zeros(3), {"least_dim": 2})
    (True, False)
    """
    return w.dim() >= int(group["least_dim"])


def trust_ratios(numerators: Tensors, denominators: Tensors, scale: float = 1.0) -> Tensors:
    """scale * a / b for each pair of norms, scalars; 1 where one of them is 0.

    >>> a, b = [torch.tensor(2.0), torch.tensor(0.0)], [torch.tensor(4.0), torch.tensor(1.0)]
    >>> [ratio.item() for ratio in trust_ratios(a, b, scale=0.5)]
    [0.25, 1.0]
    """
    over, under = torch.stack(numerators), torch.stack(denominators)
    one = torch.ones_like(over)
    return list(torch.where((over > 0) & (under > 0), scale * over / under, one).unbind())


def norms(tensors: Tensors) -> Tensors:
    """The Euclidean norm of each tensor, a scalar; of 16 bits in float32, as 65,504 ends those of float16."""
    single = tensors[0].dtype in (torch.float16, torch.bfloat16) if tensors else False
    return list(torch._foreach_norm(tensors, dtype=torch.float32) if single else torch._foreach_norm(tensors))


def real(x: Tensor) -> Tensor:
    """The tensor itself, or a view of a complex one as pairs of reals."""
    return torch.view_as_real(x) if x.is_complex() else x
