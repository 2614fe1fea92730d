"""Unwrap optimisers that a script passes, or refuse them before any change.

Hooks on a wrapper may never run, because wrappers pass `step` on. No library is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from laconic.core import arguments
from laconic.core.errors import AttachError
from laconic.optim.closure import refuse_lbfgs
from laconic.optim.nested_steps import outermost
from laconic.optim.outside_state import kept_outside, second_weights


class Wrapper(NamedTuple):
    """Wrapper that does not change steps: packages, optimiser and GradScaler."""

    packages: tuple[str, ...]
    inner: str
    scaler: tuple[str, ...] = ()


LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
WRAPPERS = {
    "AcceleratedOptimizer": Wrapper(("accelerate",), "optimizer", ("scaler",)),
    "LightningOptimizer": Wrapper(LIGHTNING, "optimizer", ("_strategy", "precision_plugin", "scaler")),
    "_FabricOptimizer": Wrapper(LIGHTNING, "optimizer", ("_strategy", "precision", "scaler")),
    "OptimizerWrapper": Wrapper(("torchft",), "optim"),
}
OURS = {"DistributedOptimizer": Wrapper(("laconic",), "optimizer")}  # and its subclasses
NAMES = ("optimizer", "optim", "base_optimizer", "_optimizer", "_optim", "inner_optimizer", "opt")

Optimizers = Optimizer | Sequence[Optimizer]
Scaler = torch.amp.GradScaler | None
Hook = Callable[..., Any]


def unwrap(given: object) -> Optimizer:
    return _opened(given)[0]


def unwrap_all(given: object, scaler: Scaler = None) -> tuple[list[Optimizer], Scaler]:
    """Return optimisers without wrappers, and the GradScaler that steps them. Raises `AttachError`."""
    check_is_scaler(scaler)
    opened = [_opened(each) for each in _as_list(given)]
    if not opened:
        raise AttachError(
            "there is no optimiser in this list: give the one that steps the model's parameters, or several"
        )
    for _, found in opened:
        if found is not None and scaler is not None and found is not scaler:
            raise AttachError(
                "scaler= is not the GradScaler by which this optimiser steps: leave it out, and that of the"
                " trainer is used"
            )
        scaler = scaler or found
    return [each for each, _ in opened], scaler


def require_plain(given: object, feature: str) -> Optimizer:
    """Return an optimiser that steps its weights itself and stores all momentum in its `state`.

    Raises `AttachError`, with the `feature`, for a wrapper's own `step` (Lookahead, SAM, ZeRO), LBFGS, or
    state elsewhere.
    """
    optimizer = unwrap(given)
    if _known(optimizer, OURS) is not None:
        optimizer = unwrap(optimizer.optimizer)  # type: ignore[attr-defined]
    refuse_wrapper(optimizer, feature)
    refuse_lbfgs(optimizer, feature)
    check_state(optimizer, feature)
    _check_hooks(optimizer)
    return optimizer


def check_state(optimizer: Optimizer, feature: str) -> None:
    if place := kept_outside(optimizer):
        raise AttachError(
            f"{type(optimizer).__name__} keeps what belongs to single weights in {place}, where {feature}"
            " cannot clear it: keep it in optimizer.state[parameter], or use an optimiser of torch.optim"
        )


def require_single_weights(optimizer: Optimizer, feature: str) -> None:
    """Raise `AttachError` for a second set of weights, which no rank would average."""
    refuse_wrapper(optimizer, feature)
    if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
        raise AttachError(
            f"{type(optimizer).__name__} keeps a second set of weights, which its train() and eval() put into"
            f" the model, and {feature} averages only the first: use the same optimiser without (AdamW for"
            " AdamWScheduleFree), or a method that exchanges gradients, such as 'cgx()'"
        )
    if place := second_weights(optimizer):
        raise AttachError(
            f"{type(optimizer).__name__} keeps a second set of weights in {place}, and {feature} averages the"
            " model's alone: use an optimiser without, or a method that exchanges gradients, such as 'cgx()'"
        )


def stepping(optimizer: Optimizer) -> Optimizer:
    """Return the optimiser whose hooks run whenever these parameters are updated.

    It is the innermost one with all of them: SAM steps only that. Raises `AttachError` if it runs no hooks.
    """
    seen: list[Optimizer] = []
    while True:
        seen.append(optimizer)
        inner = [each for each in _inner(optimizer).values() if all(each is not known for known in seen)]
        if len(inner) != 1 or not isinstance(inner[0], Optimizer) or not _held(optimizer) <= _held(inner[0]):
            break
        optimizer = inner[0]
    _check_hooks(optimizer)
    return optimizer


def before_steps(optimizer: Optimizer, hook: Hook, *, first: bool = False) -> RemovableHandle:
    """Call this hook once before each step. `first`: before earlier hooks."""
    handle = optimizer.register_step_pre_hook(outermost(hook))
    if first:
        hooks = handle.hooks_dict_ref()
        assert hooks is not None
        hooks.move_to_end(handle.id, last=False)
    return handle


def after_steps(optimizer: Optimizer, hook: Hook) -> RemovableHandle:
    return optimizer.register_step_post_hook(outermost(hook))


def check_is_scaler(scaler: object) -> None:
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise AttachError(
            f"scaler= takes the GradScaler that the script steps by, got {arguments.shown(scaler)}: give"
            " torch.amp.GradScaler(...), or leave it out where there is none"
        )


def is_ours(given: object) -> bool:
    while (wrapper := _known(given, WRAPPERS)) is not None:
        given = getattr(given, wrapper.inner)
    return _known(given, OURS) is not None


def _as_list(given: object) -> list[object]:
    return [*given] if isinstance(given, Iterable) and not isinstance(given, Tensor) else [given]


def _opened(given: object) -> tuple[Optimizer, Scaler]:
    scaler: Any = None
    while (wrapper := _known(given, WRAPPERS)) is not None:
        found: Any = given
        for name in wrapper.scaler:
            found = getattr(found, name, None)
        scaler = found if wrapper.scaler and found is not None else scaler
        given = getattr(given, wrapper.inner)
    if not issubclass(type(given), Optimizer):
        raise AttachError(
            "optimizer= takes the torch.optim.Optimizer that steps the model's parameters, or a list of"
            f" several, got {type(given).__name__}{_instead_of(given)}"
        )
    assert isinstance(given, Optimizer)
    return given, scaler


def _known(given: object, wrappers: dict[str, Wrapper]) -> Wrapper | None:
    for kind in type(given).__mro__:
        wrapper = wrappers.get(kind.__name__)
        if wrapper is not None and kind.__module__.split(".")[0] in wrapper.packages:
            return wrapper
    return None


def _instead_of(given: object) -> str:
    if isinstance(given, LRScheduler):
        return ": give its optimiser, scheduler.optimizer"
    if isinstance(given, Tensor):
        return ": build one over them, such as torch.optim.SGD(model.parameters(), lr=0.1)"
    for name, inside in _inner(given).items():
        return f", which wraps a {type(inside).__name__}: give that one, its .{name}"
    return ""


def refuse_wrapper(optimizer: Optimizer, feature: str) -> None:
    inner = _inner(optimizer)
    if not inner:
        return
    kind = type(optimizer).__name__
    if len(inner) > 1:
        raise AttachError(
            f"{kind} holds {len(inner)} optimisers ({', '.join(inner)}), and {feature} takes one that steps"
            " its weights itself: give that one, before you combine them"
        )
    name, inside = next(iter(inner.items()))
    within = type(inside).__name__
    raise AttachError(
        f"{kind} wraps a {within} as .{name} and has a step of its own, and {feature} needs the optimiser"
        f" that steps and keeps the weights itself: train with {within} alone; or, if {kind} keeps neither"
        f" weights nor momentum itself, give optimizer.{name}"
    )


def _inner(given: object) -> dict[str, Any]:
    fields = dict(vars(given)) if hasattr(given, "__dict__") else {}
    for name in NAMES:  # with __slots__ or properties
        if name not in fields and isinstance(given, Optimizer) is False:
            fields[name] = getattr(given, name, None)
    own = _held(given)
    found: dict[str, Any] = {}
    for name, value in fields.items():
        several = isinstance(value, (list, tuple, set, frozenset, dict))
        parts = (value.values() if isinstance(value, dict) else value) if several else (value,)
        for number, each in enumerate(parts):
            if each is given or not _is_optimizer(each) or any(each is other for other in found.values()):
                continue
            if not own or own & _held(each):
                found[f"{name}[{number}]" if several else name] = each
    return found


def _is_optimizer(value: object) -> bool:
    if isinstance(value, Optimizer):
        return True
    fields = getattr(value, "__dict__", {}) if not isinstance(value, (type, torch.nn.Module)) else {}
    return isinstance(fields.get("param_groups"), list) and callable(getattr(value, "step", None))


def _held(given: object) -> set[int]:
    groups = getattr(given, "param_groups", None)
    if not isinstance(groups, (list, tuple)):
        return set()
    return {id(each) for group in groups for each in group["params"]}


def _check_hooks(optimizer: Optimizer) -> None:
    if type(optimizer).register_step_pre_hook is not Optimizer.register_step_pre_hook:
        return  # it passes hooks on
    has = "_optimizer_step_pre_hooks" in vars(optimizer)
    if not (has and getattr(type(optimizer).step, "hooked", False)):
        raise AttachError(
            f"{type(optimizer).__name__} has not called torch.optim.Optimizer.__init__, so its step runs no"
            " hooks, and Laconic would never see a step: call super().__init__(params, defaults) in it, or"
            " give the optimiser that it steps"
        )


def is_skipped(optimizer: Optimizer) -> bool:
    """Return whether the current step, in whose hook this is called, is skipped for Inf or NaN.

    This is for a fused optimiser, which skips inside `step`.
    """
    return bool(getattr(optimizer, "found_inf", False))
