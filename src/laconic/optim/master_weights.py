"""Float32 master weights for models with bfloat16 or float16 parameters, under any torch optimiser.

An update below |w| / 512 does not change a bfloat16 weight w. So the optimiser steps float32 weights, which
are rounded for the model (Micikevicius et al. 2018, arXiv:1710.03740 [recalled]):

    m = m - lr * update(float32(grad))        w = round(m)

or, without the copy m, float32(w) is stepped and rounded at random. Outside `step`, schedules, clipping, DDP
and `laconic.compress` see the model's parameters.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args
from weakref import WeakKeyDictionary, ref

from torch.optim import Optimizer

from laconic.core.errors import AttachError
from laconic.optim.masters import Masters
from laconic.optim.stochastic_rounding import HALF
from laconic.optim.unwrapping import is_ours, refuse_wrapper, unwrap_all

Rounding = Literal["nearest", "stochastic"]
Kind = TypeVar("Kind", bound=Optimizer)
# weak: masters hold their optimiser, whose `step` keeps them alive
_masters: WeakKeyDictionary[Optimizer, ref[Masters]] = WeakKeyDictionary()


def master_weights(optimizer: Kind, *, rounding: Rounding = "nearest", seed: int = 0) -> Kind:
    """Let this optimiser step float32 weights instead of its half-precision parameters.

    Its state is float32 as well; float32 parameters do not change. Entries written from outside, by
    `model.load_state_dict` or a mask, restart from the written value. With a GradScaler and float16
    parameters, do not call `scaler.unscale_`, which torch refuses.

    Memory per weight: 4 bytes for masters, and 4 for gradients inside a step; with "stochastic" 8, only
    inside. `optimizer.state_dict()` has the masters or the number of roundings, for an exact resumption.
    `copy.deepcopy` copies the masters; pickle does not.

    Args:
        optimizer: Any `torch.optim.Optimizer`, before or after `laconic.compress`; before
            `laconic.distribute` and before building a learning rate schedule.
        rounding: "nearest" stores masters; "stochastic" stores none and rounds at random: unbiased, with
            noise of up to one step of the 16-bit grid.
        seed: Seed of the random rounding, equal on all ranks.

    Returns:
        The same optimiser.

    Raises:
        AttachError: It has masters, has no trained parameter in half precision, is a result of
            `laconic.distribute`, or is a wrapper with its own step, such as Lookahead or SAM; `rounding` is
            unknown, or stochastic for sharded parameters. Nothing is changed.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> optimizer = master_weights(torch.optim.SGD([w], lr=1e-4))
    >>> for _ in range(100):
    ...     w.grad = torch.ones_like(w)
    ...     optimizer.step()
    >>> w.item(), round(optimizer.state_dict()["state"][0]["master_weight"].item(), 4)
    (0.98828125, 0.99)
    """
    if rounding not in get_args(Rounding):
        raise AttachError(f"rounding must be one of {get_args(Rounding)}, got {rounding!r}")
    if is_ours(optimizer):
        raise AttachError(
            f"{type(optimizer).__name__} wraps another optimiser: call master_weights on that one, then wrap"
            " it, as in laconic.distribute(model, master_weights(optimizer), spec)"
        )
    given = optimizer
    (optimizer,), scaler = unwrap_all([given])  # type: ignore[assignment]
    refuse_wrapper(optimizer, "master_weights")
    if optimizer in _masters:
        raise AttachError("this optimiser has master weights already: call master_weights once")
    if scaler is not None:
        raise AttachError(
            f"this {type(given).__name__} has a GradScaler and a reference to the original `step`: call"
            " master_weights before the trainer wraps the optimiser"
        )
    held = [each for group in optimizer.param_groups for each in group["params"]]
    if not any(each.dtype in HALF and each.requires_grad for each in held):
        found = ", ".join(sorted({str(each.dtype) for each in held})) or "none"
        raise AttachError(
            "master_weights needs trained parameters in bfloat16 or float16, but this optimiser's are"
            f" {found}: call model.to(torch.bfloat16) first, or use torch.autocast with float32 parameters"
        )
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    if rounding == "stochastic" and any(isinstance(each, sharded) for each in held):
        raise AttachError(
            "these parameters are sharded, which stochastic rounding does not support: use rounding='nearest'"
        )
    _install(optimizer, Masters(optimizer, at_random=rounding == "stochastic", seed=seed))
    return given


def masters_of(optimizer: Optimizer) -> Masters | None:
    found = _masters.get(optimizer)
    return None if found is None else found()


def _install(optimizer: Optimizer, masters: Masters) -> None:
    """Replace the object's `step` and `load_state_dict`; a hook would run after others read the groups."""
    _masters[optimizer] = ref(masters)
    step, load = optimizer.step, optimizer.load_state_dict

    @functools.wraps(step.__func__ if inspect.ismethod(step) else step)
    def mastered_step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return masters.step(step, closure)

    def mastered_load(self: Optimizer, state_dict: dict[str, Any]) -> None:
        masters.load(load, state_dict)

    def mastered_copy(self: Optimizer, memo: dict[int, Any]) -> Optimizer:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # without own methods
        _install(made, masters.copied(made, memo))
        return made

    # schedulers take `step.__func__`
    optimizer.step = types.MethodType(mastered_step, optimizer)  # type: ignore[method-assign]
    optimizer.load_state_dict = types.MethodType(mastered_load, optimizer)  # type: ignore[method-assign]
    optimizer.__deepcopy__ = types.MethodType(mastered_copy, optimizer)  # type: ignore[attr-defined]
    optimizer.register_state_dict_post_hook(lambda _, state: masters.added_to(state))
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # GradScaler passes its scale
