"""Mixed precision: autocast, and for float16 a GradScaler shared by all ranks.

Micikevicius et al. 2018, arXiv:1710.03740 [recalled]. Parameters stay in float32. Within a step:

    scale the loss -> backward -> unscale -> memory, codec, mean -> scale the mean -> unscale, step or skip
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.core.errors import NonFiniteError, SpecError
from laconic.strategies.strategy import Strategy
from laconic.tools.tasks.task import Task, Tensors, cross_entropy

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = ("fp32", *DTYPES)
LEAST_SCALE = 2.0**-10  # 26 halvings of the first scale


class Precision:
    """Precision of one rank. `name`: None (float32), "bf16" or "fp16"."""

    def __init__(self, name: str | None, device: str = "cpu") -> None:
        self._device = device
        self._dtype = DTYPES.get(name or "")
        self.scaler = torch.amp.GradScaler(device) if self._dtype == torch.float16 else None
        self.skipped = False  # the last step

    def autocast(self) -> torch.autocast:
        return torch.autocast(self._device, self._dtype, enabled=self._dtype is not None)

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))

    def step(self, optimizer: Optimizer) -> None:
        """Step the optimiser, or skip the step after an overflow.

        Raises `NonFiniteError` if the scale is too low for an overflow.
        """
        if self.scaler is None:
            optimizer.step()
            return
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        scale = self.scaler.get_scale()
        self.skipped = scale < before
        if scale < LEAST_SCALE:
            raise NonFiniteError(
                f"the loss scale has fallen to {scale:g}, below {LEAST_SCALE:g}: no scale makes gradients"
                " finite"
            )

    def event_fields(self, before: float | None) -> dict[str, Any]:
        return {} if before is None else {"loss_scale": before, "skipped": self.skipped}

    @property
    def scale(self) -> float | None:
        return None if self.scaler is None else self.scaler.get_scale()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scaler is not None:
            self.scaler.load_state_dict(dict(state))


def normal(name: str | None) -> str | None:
    """Return a precision's name, None for float32. Raises `SpecError`.

    >>> normal("fp32"), normal("bf16")
    (None, 'bf16')
    """
    if name is not None and name not in NAMES:
        raise SpecError(f"--precision must be one of {', '.join(NAMES)}, got {name!r}")
    return None if name == "fp32" else name


def check_strategy(name: str | None, strategy: object, patience_s: float | None) -> None:
    """Raise `SpecError` for float16, whose scaler is shared, if ranks do not wait for each other."""
    if name != "fp16" or not isinstance(strategy, Strategy):
        return
    why = None
    if strategy.clocked:
        why = f"{strategy!r} lets workers step at their own pace"
    elif patience_s is not None:
        why = "--patience lets workers be lost"
    if why is not None:
        raise SpecError(
            f"--precision fp16 shares an overflow flag among all workers at every step, but {why}: use"
            " --precision bf16, which needs no loss scaling"
        )


def check_device(name: str | None, task: Task, model: str | None, tensors: Tensors) -> None:
    """Raise `SpecError` unless this machine can train two examples in this precision."""
    if name is None:
        return
    precision, net = Precision(name), task.recipe(model).build()
    x, y = task.inputs(tensors["train_x"][:2], None), tensors["train_y"][:2]
    try:
        with precision.autocast():
            loss = cross_entropy(net(x), y)
        precision.backward(loss)
    except (RuntimeError, NotImplementedError) as error:
        other = "bf16" if name == "fp16" else "fp32"
        which = f"{task.name}'s model {model or next(iter(task.models))}"
        raise SpecError(
            f"--precision {name}: this machine's CPU cannot train {which} in it"
            f" ({str(error).split('. ')[0]}); use --precision {other}, or another --model"
        ) from error
