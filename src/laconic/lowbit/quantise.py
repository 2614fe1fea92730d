"""Training with few bits in weights, inputs and gradients (Hubara et al. 2016, arXiv:1609.07061).

Equations: `few_bit_layers`, `few_bit_recurrent`, `levels`, `log_gradient`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from laconic.core.spec import Status
from laconic.lowbit.few_bit_handle import FewBitHandle
from laconic.lowbit.few_bit_training import FewBitTraining, First, Last, Norm
from laconic.lowbit.few_bits import FewBits, Scale


@dataclass(frozen=True)
class Bits:
    weights: int = 1
    activations: int | None = 2
    gradients: int | None = 6
    scale: Scale = "linear"


@dataclass(frozen=True, repr=False)
class QuantiseTraining(FewBitTraining, Bits):
    """Configuration with the arguments of `laconic.lowbit.quantise`."""

    paper: ClassVar[str] = "Hubara et al. 2016, arXiv:1609.07061"
    status: ClassVar[Status] = "reconstruction"
    examples: ClassVar[tuple[str, ...]] = ("quantise()", "quantise(activations=4, gradients=None)")

    @property
    def bits(self) -> FewBits:
        return FewBits(self.weights, self.activations, self.gradients, self.scale, self.stochastic, self.seed)


def quantise(
    model: nn.Module,
    weights: int = 1,
    activations: int | None = 2,
    gradients: int | None = 6,
    *,
    scale: Scale = "linear",
    first: First = "real",
    last: Last = "real",
    stochastic: bool = False,
    norm: Norm = "float",
    keep: Collection[str] = (),
    seed: int = 0,
) -> FewBitHandle:
    """Train a model with few bits in the weights, inputs and gradients of its layers.

    Args:
        model: Its Linear, Conv2d, LSTM, GRU, LSTMCell and GRUCell layers are replaced.
        weights: Bits of weights, 1 to 8.
        activations: Bits of inputs, 1 to 8, or None for float32.
        gradients: Bits of outputs' gradients, 3 to 8, or None for float32: powers of two, rounded at random.
        scale: "linear" levels from -1 to 1, or "log", powers of two, which cannot be packed.
        stochastic: Round inputs at random in training; see `binarise` for activation checkpointing.
        seed: Seed of rounding, different on each rank.
        first, last, norm, keep: As for `binarise`.

    Returns:
        The handle, as for `binarise`, with the same errors.
    """
    spec = QuantiseTraining(weights, activations, gradients, scale, first, last, stochastic, norm, seed=seed)
    return spec.attach_layers(model, keep)
