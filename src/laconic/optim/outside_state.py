"""Search for tensors of single weights outside of `state[parameter]`, which a reset would miss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SKIPPED = ("param_groups", "state", "defaults")
MAX_DEPTH, MAX_OBJECTS = 5, 10_000


def kept_outside(optimizer: Optimizer) -> str:
    """Return where the optimiser keeps a tensor of a matrix's size outside of `state`, or "".

    Flat tensors for all weights count, and attributes of parameters; views of weights or gradients and masks
    do not.

    >>> weight = nn.Parameter(torch.zeros(3, 4))
    >>> sgd = torch.optim.SGD([weight])
    >>> kept_outside(sgd)
    ''
    >>> sgd.slow = [torch.zeros(3, 4)]
    >>> kept_outside(sgd)
    'SGD.slow[0]'
    """
    return next((place for place, _ in _outside(optimizer)), "")


def second_weights(optimizer: Optimizer, within: float = 0.0) -> str:
    """Return where an optimiser keeps a second set of weights, as Lookahead does, or "".

    Its values are within a relative distance of the parameters.

    >>> weight = nn.Parameter(torch.ones(3, 4))
    >>> optimizer = type("Mine", (torch.optim.SGD,), {"__module__": "mine"})([weight])
    >>> second_weights(optimizer)
    ''
    >>> optimizer.state[weight]["slow"] = torch.ones(3, 4)
    >>> second_weights(optimizer)
    "Mine.state[parameter]['slow']"
    """
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] in ("torch", "laconic"):
        return ""
    held = [
        each
        for group in optimizer.param_groups
        for each in group["params"]
        if not each.is_meta and each.any()
    ]
    near: dict[str, list[bool]] = {}
    for parameter in held:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                found = near.setdefault(f"{kind.__name__}.state[parameter][{key!r}]", [])
                found.append(_is_near(value, parameter, within))
    for place, tensor in _outside(optimizer):
        near[place] = [any(_is_near(tensor, each, within) for each in held if each.shape == tensor.shape)]
    return next((place for place, found in near.items() if all(found)), "")


def _is_near(tensor: Tensor, parameter: Tensor, within: float) -> bool:
    apart = torch.dist(tensor.detach().double(), parameter.detach().double())
    return bool(apart <= within * parameter.detach().double().norm())


def _outside(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    held = [each for group in optimizer.param_groups for each in group["params"]]
    matrices = [each for each in held if each.dim() > 1 and each.numel() > 1]
    shapes = {tuple(each.shape) for each in matrices}
    flat = {each.numel() for each in matrices} | {sum(each.numel() for each in held)}
    known = {_storage(each) for each in held} | {
        _storage(each.grad) for each in held if each.grad is not None
    }
    own = {id(each) for each in held}
    seen: set[int] = set()
    fields = {key: value for key, value in vars(optimizer).items() if key not in SKIPPED}
    places = _walk(fields, type(optimizer).__name__, seen, attributes=True)
    strange = {str(key): value for key, value in optimizer.state.items() if id(key) not in own}
    own_fields = (
        _walk(vars(each), "parameter", seen, attributes=True)
        for each in matrices
        if type(each) in (nn.Parameter, Tensor)
    )
    found = (*places, *_walk(strange, f"{type(optimizer).__name__}.state", seen), *chain(*own_fields))
    for place, tensor in found:
        fits = tuple(tensor.shape) in shapes or (bool(matrices) and tensor.dim() == 1 and len(tensor) in flat)
        if fits and tensor.dtype != torch.bool and _storage(tensor) not in known:
            yield place, tensor


def _walk(
    value: Any, place: str, seen: set[int], depth: int = 0, attributes: bool = False
) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
        return
    if depth > MAX_DEPTH or len(seen) > MAX_OBJECTS or id(value) in seen:
        return
    if isinstance(value, (str, bytes, int, float, type, nn.Module, Optimizer, torch.device, torch.dtype)):
        return
    if callable(value) and not isinstance(value, Mapping):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        for key, each in list(value.items()):
            at = f"{place}.{key}" if attributes else f"{place}[{_short(key)}]"
            yield from _walk(each, at, seen, depth + 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for number, each in enumerate(value):
            yield from _walk(each, f"{place}[{number}]", seen, depth + 1)
    elif hasattr(value, "__dict__"):
        yield from _walk(vars(value), place, seen, depth + 1, attributes=True)


def _short(key: object) -> str:
    return "..." if isinstance(key, Tensor) else repr(key)[:40]


def _storage(tensor: Tensor) -> int:
    """Return the address of its memory; its id without one (sparse and meta tensors)."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):
        return id(tensor)
