"""Training with the signs of weights and inputs (Courbariaux et al. 2016, arXiv:1602.02830).

Checked against the authors' code: signs with sign(0) = 1, float32 master weights clipped to [-1, 1] after
each step, the gradient of a hard tanh. The equations are in `few_bit_layers` and `levels`.
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
    """The arguments of `laconic.lowbit.binarise`."""

    paper: ClassVar[str] = "Courbariaux et al. 2016, arXiv:1602.02830"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "MatthieuCourbariaux/BinaryNet"
    examples: ClassVar[tuple[str, ...]] = ("binarise()", "binarise(first='weights', last='binary')")

    first: First = "real"
    last: Last = "real"
    stochastic: bool = False
    norm: Norm = "float"
    keep: tuple[str, ...] = ()
    seed: int = 0

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
    """Train a model with the signs of its weights and of the inputs of its layers, from now on.

    The model changes in place. Its parameters are the same objects, float32 and under the same names:
    optimisers, DistributedDataParallel, `laconic.compress` and `state_dict` work as before. Each step of an
    optimiser clips the treated layers' weights to [-1, 1]. Sign what has both signs: end a block by a
    BatchNorm, without a ReLU before the next layer, for a ReLU's results all have the sign 1. `pack` makes
    the model for use of what was trained.

    The arithmetic is that of float32: training takes no less time or memory than before.

    Args:
        model: Its Linear, Conv2d, LSTMCell and GRUCell layers are replaced.
        first: The first of these layers, in the model's own order: "real" (default) leaves it as it is,
            "weights" takes the signs of its weights alone, "binary" treats it as the others.
        last: "real" (default) leaves the last one as it is, "binary" treats it as the others.
        stochastic: Draw the signs of inputs in training, P(1) = clip((x + 1) / 2, 0, 1); default: no.
            Activation checkpointing repeats the draws of a layer's last 512 calls.
        norm: "shift" replaces BatchNorm by `ShiftBatchNorm`; default: "float", as it is.
        keep: Names of modules that do not change, with everything inside; default: none.
        seed: Of what is drawn; give each rank its own. Default: 0.

    Returns:
        The handle, which counts flips of signs, saves the state of what is drawn, and takes it all back.

    Raises:
        SpecError: An argument is out of range.
        AttachError: The model has no such layers, or is one itself, or is treated already; a layer is not
            float32, shares a weight, has hooks, or pads otherwise than with a number of zeros; `keep` names
            no module. Nothing has changed then.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2))
    >>> handle = binarise(net)
    >>> [type(layer).__name__ for layer in net]
    ['Linear', 'BatchNorm1d', 'FewBitLinear', 'Linear']
    """
    return BinariseTraining(first, last, stochastic, norm, seed=seed).attached(model, keep)
