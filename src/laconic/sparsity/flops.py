"""Floating-point operations of a sparse model, as the RigL authors count them.

    forward  = 2 * sum over weights of (entries in use) * (times that each entry is used)
    training = 3 * forward + (dense forward - forward) * (share of steps with dense gradients of the weights)

An entry is used once per input row, output position of a convolution, time step, or token of attention's
projections. Nothing else is counted. Evci et al. 2020, arXiv:1911.11134, appendix H, with the share 1 /
(every + 1); ours is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from laconic.core.mask import mask_of
from laconic.sparsity.selection import CELLS, CONVOLUTIONS, DENSE, RECURRENT, weights_of
from laconic.transforms.fast_path import FastPathOff

Uses = list[tuple[Tensor, int]]  # entries in use, bool, and how often each is used


@dataclass(frozen=True)
class Flops:
    """Operations of products with weights, for one batch.

    Attributes:
        forward: Forward pass at the present densities.
        dense_forward: Forward pass without masks.
        training: Mean training step.
        dense_training: Training step without masks.
    """

    forward: int
    dense_forward: int
    training: float
    dense_training: int

    @classmethod
    def of(cls, forward: int, dense: int, dense_steps: float) -> Flops:
        return cls(forward, dense, 3 * forward + dense_steps * (dense - forward), 3 * dense)


@torch.no_grad()
def forward_flops(model: nn.Module, *inputs: Any) -> tuple[int, int]:
    """Return the operations of a forward pass, at the present densities and dense.

    >>> forward_flops(nn.Linear(3, 5), torch.zeros(2, 3))
    (60, 60)
    """
    total = [0, 0]
    modes = {module: module.training for module in model.modules()}
    layers = [module for module in modes if type(module) in COUNTS]
    hooks: list[RemovableHandle | FastPathOff] = [FastPathOff(model, layers)]

    def count(layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        for used, times in COUNTS[type(layer)](layer, args, kwargs, output):
            total[0] += 2 * times * int(used.sum())
            total[1] += 2 * times * used.numel()

    try:
        hooks += [layer.register_forward_hook(count, with_kwargs=True) for layer in layers]
        model.eval()(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    return total[0], total[1]


def _in_use(layer: nn.Module) -> list[Tensor]:
    masks = ((weight, mask_of(weight)) for _, weight in weights_of(layer))
    return [torch.ones_like(each, dtype=torch.bool) if mask is None else mask.used for each, mask in masks]


def _of_outputs(layer: Any, args: Any, kwargs: Any, output: Tensor) -> Uses:
    return [(used, output.numel() // len(used)) for used in _in_use(layer)]


def _of_inputs(layer: Any, args: Any, kwargs: Any, output: Any) -> Uses:
    x = args[0] if args else kwargs["input"]
    x = x.data if isinstance(x, PackedSequence) else x
    return [(used, x.numel() // layer.input_size) for used in _in_use(layer)]


def _of_attention(layer: Any, args: Any, kwargs: Any, output: Any) -> Uses:
    given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
    tokens = [given[name].numel() // given[name].shape[-1] for name in ("query", "key", "value")]
    parts = _in_use(layer)
    parts = [*parts[0].chunk(3)] if len(parts) == 1 else parts
    out_proj = [(used, tokens[0]) for used in _in_use(layer.out_proj)]  # torch reads it, never calls it
    return [*zip(parts, tokens, strict=True), *out_proj]


COUNTS: dict[type, Any] = {
    **dict.fromkeys((DENSE[0], *CONVOLUTIONS), _of_outputs),
    **dict.fromkeys((*RECURRENT, *CELLS), _of_inputs),
    nn.MultiheadAttention: _of_attention,
}
