"""Training with the signs of weights and inputs (Courbariaux et al. 2016, arXiv:1602.02830).

Checked against the authors' code: sign(0) = 1, float32 master weights clipped to [-1, 1] after each step, the
gradient of a hard tanh. Equations: `few_bit_layers`, `few_bit_recurrent`, `levels`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from laconic.core.spec import Status
from laconic.lowbit.few_bit_handle import FewBitHandle
from laconic.lowbit.few_bit_training import FewBitTraining, First, Last, Norm
from laconic.lowbit.few_bits import FewBits


@dataclass(frozen=True, repr=False)
class BinariseTraining(FewBitTraining):
    """Configuration with the arguments of `laconic.lowbit.binarise`."""

    paper: ClassVar[str] = "Courbariaux et al. 2016, arXiv:1602.02830"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "MatthieuCourbariaux/BinaryNet"
    examples: ClassVar[tuple[str, ...]] = ("binarise()", "binarise(first='weights', last='binary')")

    @property
    def bits(self) -> FewBits:
        return FewBits(stochastic=self.stochastic, seed=self.seed)


def binarise(
    model: nn.Module,
    first: First = "real",
    last: Last = "real",
    stochastic: bool = False,
    *,
    norm: Norm = "float",
    keep: Collection[str] = (),
    seed: int = 0,
) -> FewBitHandle:
    """Train a model with the signs of its weights and of its layers' inputs.

    Changes the model in place. Its parameters remain the same float32 objects, clipped to [-1, 1] after each
    step, so optimisers, DistributedDataParallel, `laconic.compress` and `state_dict` work as before. Inputs
    should have both signs: end a block with a BatchNorm, not a ReLU. Training saves neither time nor memory;
    for inference use `pack`.

    Args:
        model: Its Linear, Conv2d, LSTM, GRU, LSTMCell and GRUCell layers are replaced.
        first: First of these layers: "real" leaves it unchanged, "weights" takes only its weights' signs; or
            "binary".
        last: Last of these layers: "real" or "binary".
        stochastic: Draw the signs of inputs in training, P(1) = clip((x + 1) / 2, 0, 1). Activation
            checkpointing repeats the draws of a layer's last 512 calls.
        norm: "shift" replaces BatchNorm with `ShiftBatchNorm`.
        keep: Modules to leave unchanged, with children.
        seed: Seed of the draws, different on each rank.

    Returns:
        The handle, which counts sign flips.

    Raises:
        SpecError: An argument is out of range.
        AttachError: The model is unchanged. It has no such layers, or one with hooks, projections, shared
            weights, another dtype than float32 or padding that is not a number of zeros; it is binarised;
            `keep` names no module.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2))
    >>> handle = binarise(net)
    >>> [type(layer).__name__ for layer in net]
    ['Linear', 'BatchNorm1d', 'FewBitLinear', 'Linear']
    """
    return BinariseTraining(first, last, stochastic, norm, seed=seed).attach_layers(model, keep)
