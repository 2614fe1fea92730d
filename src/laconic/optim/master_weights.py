"""Float32 master weights for models whose parameters are bfloat16 or float16, under any torch optimiser.

A bfloat16 weight w keeps nothing of an update below |w| / 512, so small steps are lost. Here the optimiser
steps float32 weights, and the model gets them rounded (Micikevicius et al. 2018, arXiv:1710.03740
[recalled]):

    m = m - lr * update(float32(grad))        w = round(m)

or, without the copy m, float32(w) is stepped and rounded at random (`stochastic_rounding.py`).

The optimiser stays the same object. Between steps its groups hold the model's parameters, so schedules,
clipping, DDP and `laconic.compress` see an ordinary optimiser; only inside `step` do they hold float32.
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
# weak references, as masters hold their optimiser; its `step` keeps them
_masters: WeakKeyDictionary[Optimizer, ref[Masters]] = WeakKeyDictionary()


def master_weights(optimizer: Kind, *, rounding: Rounding = "nearest", seed: int = 0) -> Kind:
    """Let this optimiser step float32 weights in place of its parameters in half precision.

    Its state (momentum, Adam's moments) is float32 too; parameters in float32 stay as they are. Where a
    parameter was written from outside, as `model.load_state_dict` or a mask does, those entries start anew
    from what was written. With a GradScaler and float16 parameters, do not call `scaler.unscale_`, which
    torch refuses for float16: the step divides in float32.

    Memory: 4 bytes a weight for the masters, and 4 for their gradients inside a step. "stochastic": none
    between steps, 8 bytes inside. `optimizer.state_dict()` has the masters as "master_weight" of each state,
    or the number of roundings as "roundings": a resumed run does the same bits. `copy.deepcopy` copies the
    masters too; pickle does not, so save the `state_dict`.

    Args:
        optimizer: Any `torch.optim.Optimizer` over the model's parameters, before or after
            `laconic.compress`; before `laconic.distribute`, and before a schedule of its rates is built, as
            torch warns of another `step` there.
        rounding: "nearest" (default) keeps masters; "stochastic" keeps none, and rounds the stepped weights
            at random: unbiased, with a noise of up to one step of the 16-bit grid.
        seed: Of the random rounding; equal on all ranks, so that equal replicas stay equal. Default: 0.

    Returns:
        The same optimiser.

    Raises:
        AttachError: With nothing changed: it has master weights already, holds no trained parameter in half
            precision, is what `laconic.distribute` returned, or `rounding` is unknown, or random for sharded
            parameters; or it wraps another optimiser and has a step of its own, as Lookahead and SAM.

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
            f"{type(optimizer).__name__} wraps another optimiser: give master_weights that one first, then"
            " wrap it, as in laconic.distribute(model, master_weights(optimizer), spec)"
        )
    given = optimizer
    (optimizer,), scaler = unwrap_all([given])  # type: ignore[assignment]
    refuse_wrapper(optimizer, "master_weights")
    if optimizer in _masters:
        raise AttachError("this optimiser has master weights already: call master_weights once")
    if scaler is not None:
        raise AttachError(
            f"this {type(given).__name__} has a GradScaler, and steps by the `step` that it found when it was"
            " made: call master_weights before the trainer wraps the optimiser"
        )
    held = [each for group in optimizer.param_groups for each in group["params"]]
    if not any(each.dtype in HALF and each.requires_grad for each in held):
        found = ", ".join(sorted({str(each.dtype) for each in held})) or "none"
        raise AttachError(
            "master_weights is for trained parameters in bfloat16 or float16, and this optimiser's are"
            f" {found}: convert the model first, model.to(torch.bfloat16), or leave it in float32 and use"
            " torch.autocast, where the parameters are the masters"
        )
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    if rounding == "stochastic" and any(isinstance(each, sharded) for each in held):
        raise AttachError(
            "these parameters are sharded, and rounding at random is for whole ones: take"
            " rounding='nearest', whose masters are sharded too"
        )
    _install(optimizer, Masters(optimizer, at_random=rounding == "stochastic", seed=seed))
    return given


def masters_of(optimizer: Optimizer) -> Masters | None:
    """The masters of an optimiser, or None."""
    found = _masters.get(optimizer)
    return None if found is None else found()


def _install(optimizer: Optimizer, masters: Masters) -> None:
    """Around this object's `step` and `load_state_dict`: hooks would be too late, as others read groups."""
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
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # which leaves methods of the object out
        _install(made, masters.copied(made, memo))
        return made

    # methods, as schedulers take `step.__func__`
    optimizer.step = types.MethodType(mastered_step, optimizer)  # type: ignore[method-assign]
    optimizer.load_state_dict = types.MethodType(mastered_load, optimizer)  # type: ignore[method-assign]
    optimizer.__deepcopy__ = types.MethodType(mastered_copy, optimizer)  # type: ignore[attr-defined]
    optimizer.register_state_dict_post_hook(lambda _, state: masters.added_to(state))
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # GradScaler hands its scale over
