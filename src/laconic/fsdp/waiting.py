"""Gradients that wait for the end of the backward pass, as their module may have more.

FSDP2 reduces a module's gradient once per call and adds them up; an exchange takes each tensor once per step.
So gradients add up here, and the mean is added at the end. Once one waits, all later ones do: the order of
exchanges is equal even if ranks count different calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.fsdp.models import param_group_of


@dataclass(frozen=True)
class Waiting:
    """Sum of one module's gradients, float32 (n,), and its mean."""

    module: str
    group: Any
    flat: Tensor
    mean: Tensor

    def add_mean(self, layout: Layout) -> None:
        trained = (each for each in self.group.fsdp_params if each.sharded_param.requires_grad)
        for parameter, entry in zip(trained, layout, strict=True):
            size, stride = parameter.sharded_size, parameter.contiguous_sharded_stride
            part = torch.as_strided(self.mean, size, stride, entry.offset)
            grad = parameter.sharded_param.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            with torch.no_grad():
                local.add_(part.to(device=local.device, dtype=local.dtype))


class WaitingGradients:
    def __init__(self) -> None:
        self._sums: dict[str, Waiting] = {}
        self._exchanged: set[str] = set()
        self._repeated: set[str] = set()  # several gradients in a pass

    def begin(self) -> None:
        self._sums.clear()
        self._exchanged.clear()

    @property
    def none_exchanged(self) -> bool:
        return not self._exchanged

    def exchanged(self, name: str) -> None:
        self._exchanged.add(name)

    def waits(self, name: str, module: FSDPModule) -> bool:
        if name in self._exchanged:
            raise AttachError(
                f"{name or 'the model'} has two gradients in one backward pass, and the first is exchanged"
                " already: call module(x), not its methods or submodules, once for each use in the forward"
                " pass"
            )
        return bool(self._sums) or name in self._repeated or has_more_calls(module)

    def add(self, reduced: Tensor, name: str, group: Any) -> None:
        """Add up this flat gradient (n,), and leave zeros. Raises `AttachError` if a hook would see them."""
        for parameter in group.fsdp_params:
            if getattr(parameter.sharded_param, "_post_accumulate_grad_hooks", None):
                raise AttachError(
                    f"{name or 'the model'} is called several times in a forward pass, so replicas exchange"
                    " its gradient at the end of the backward pass, and its hook of"
                    " register_post_accumulate_grad_hook() comes before that: step the optimiser after"
                    " backward()"
                )
        if name in self._sums:
            self._repeated.add(name)
            self._sums[name].flat.add_(reduced)
        else:
            flat = reduced.to(torch.float32, copy=True)
            mean = flat if reduced.dtype == torch.float32 else torch.empty_like(reduced)
            self._sums[name] = Waiting(name, group, flat, mean)
        reduced.zero_()

    def take(self) -> list[Waiting]:
        taken = [*self._sums.values()]
        self._sums.clear()
        for each in taken:
            if each.flat.is_cuda:  # FSDP2 allocates on another stream
                each.flat.record_stream(torch.cuda.current_stream(each.flat.device))
        return taken


def has_more_calls(module: FSDPModule) -> bool:
    """Return whether the forward pass may have called this module again.

    FSDP2 forgets a recorded call before each gradient, unless the script sets prefetching.
    """
    chosen = getattr(module._get_fsdp_state(), "_states_to_backward_prefetch", ())
    return len(param_group_of(module)._post_forward_indices) > bool(chosen)
