"""`large_batch`: optimiser and schedule for a batch much larger than the one a model was tuned with.

Goyal et al. 2017, arXiv:1706.02677; You et al. 2017, arXiv:1708.03888 (LARS); You et al. 2020,
arXiv:1904.00962 (LAMB).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from laconic.core import arguments
from laconic.core.errors import AttachError
from laconic.optim import LAMB, LARS
from laconic.optim.schedule import Scaling, WarmUpThenDecay, rate_factor

Kind = Literal["lamb", "lars", "sgd"]
TRUST = 0.02  # LARS's eta, for SGD's rates, which its vectors (no trust ratio) need


@dataclass(frozen=True)
class Defaults:
    lr: float
    weight_decay: float
    scaling: Scaling
    power: float


DEFAULTS = {
    "lamb": Defaults(lr=4e-3, weight_decay=0.01, scaling="sqrt", power=1.0),
    "lars": Defaults(lr=0.05, weight_decay=1e-4, scaling="linear", power=2.0),
    "sgd": Defaults(lr=0.05, weight_decay=1e-4, scaling="linear", power=2.0),
}


def large_batch(
    model: nn.Module,
    *,
    batch: int,
    base_batch: int,
    steps: int,
    optimizer: Kind = "lamb",
    lr: float | None = None,
    scaling: Scaling | None = None,
    warmup_steps: int | None = None,
    power: float | None = None,
    weight_decay: float | None = None,
    momentum: float = 0.9,
) -> tuple[Optimizer, LambdaLR]:
    """Return optimiser and schedule to train `model` with `batch` examples per step, over all ranks.

    The rate scales with the batch, with warm-up and polynomial decay; LAMB and LARS add layer-wise trust
    ratios; vectors have no weight decay. Call `schedule.step()` after each `optimizer.step()`. Both work with
    `laconic.compress` and `laconic.distribute`; each `state_dict` resumes exactly.

    Args:
        model: The model.
        batch: Examples per step, over all ranks and micro-batches; see `laconic.recipes.Accumulation`.
        base_batch: Examples per step for which `lr` was tuned.
        steps: All steps of the training; the rate ends at 0.
        optimizer: "lamb", "lars", or "sgd" with Nesterov momentum.
        lr: Rate at `base_batch`. None: 0.004 for LAMB; 0.05 for LARS, with trust coefficient 0.02, and SGD.
        scaling: "linear", "sqrt" or "none". None: "sqrt" for LAMB, "linear" otherwise.
        warmup_steps: Steps in which the rate rises from `lr` to the scaled one. None: a tenth of `steps`, 0
            if `batch` is at most `base_batch`.
        power: Power of the polynomial decay. None: 1 for LAMB, 2 otherwise.
        weight_decay: Weight decay of matrices. None: 0.01 for LAMB, 1e-4 otherwise.
        momentum: Momentum of LARS and SGD, in [0, 1).

    Raises:
        SpecError: A number is out of range.
        AttachError: The model has no trainable parameter.

    >>> model = nn.Linear(3, 2)
    >>> optimizer, schedule = large_batch(model, batch=512, base_batch=128, steps=100, lr=0.01)
    >>> type(optimizer).__name__, optimizer.defaults["lr"]
    ('LAMB', 0.02)
    """
    arguments.choice("optimizer", optimizer, tuple(DEFAULTS))
    arguments.whole("steps", steps, 1)
    arguments.number("momentum", momentum, least=0, below=1)
    defaults = DEFAULTS[optimizer]
    scaling = defaults.scaling if scaling is None else scaling
    lr = defaults.lr if lr is None else lr
    arguments.number("lr", lr, above=0)
    factor = rate_factor(batch, base_batch, scaling)
    if warmup_steps is None:
        warmup_steps = steps // 10 if batch > base_batch else 0
    rise = WarmUpThenDecay(steps, warmup_steps, 1 / factor, defaults.power if power is None else power)
    decay = defaults.weight_decay if weight_decay is None else weight_decay
    made = _make_optimizer(model, optimizer, lr * factor, decay, momentum)
    return made, LambdaLR(made, rise)


def _make_optimizer(model: nn.Module, kind: Kind, lr: float, decay: float, momentum: float) -> Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    if not trained:
        raise AttachError(
            f"{type(model).__name__} has no parameter that requires a gradient: pass the model to train"
        )
    if kind == "lamb":
        return LAMB(trained, lr=lr, weight_decay=decay)
    if kind == "lars":
        return LARS(trained, lr=lr, momentum=momentum, weight_decay=decay, trust=TRUST)
    arguments.number("weight_decay", decay, least=0)
    groups = [
        {"params": [each for each in trained if each.dim() > 1], "weight_decay": decay},
        {"params": [each for each in trained if each.dim() <= 1], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return torch.optim.SGD(filled, lr=lr, momentum=momentum, nesterov=momentum > 0)
