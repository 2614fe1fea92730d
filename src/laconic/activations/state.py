"""What a session has learned, by the name of its parameters, and what is wrong with a state of another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from laconic.activations.coding import Coding
from laconic.activations.layer import STATE, Layer
from laconic.core.errors import StateError

WAY = ": load what `state_dict()` of a session of this model gave"


def of(layers: Iterable[Layer], key: int, coding: Coding) -> dict[str, Any]:
    """Numbers, and the coding's spec. `key`: of the next rounding."""
    each = {layer.name: {"shape": tuple(layer.weight.shape), **layer.state()} for layer in layers}
    return {"coding": repr(coding), "key": key, "layers": each}


def check(state: Mapping[str, Any], layers: Iterable[Layer]) -> None:
    """Raise `StateError` unless `of` made this state for layers of these names and shapes."""
    wrong = _form(state)
    if wrong:
        raise StateError(f"this is no state of activations: {wrong}{WAY}")
    theirs, ours = state["layers"], {layer.name: layer for layer in layers}
    for have, lack, whose in ((theirs, ours, "it has"), (ours, theirs, "it lacks")):
        names = [repr(name) for name in have if name not in lack]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise StateError(f"this state is of another model: {whose} {', '.join(names[:3])}{more}{WAY}")
    for name, layer in ours.items():
        its = theirs[name] if isinstance(theirs[name], Mapping) else {}
        for field in ("shape", *STATE):
            if field not in its:
                raise StateError(f"this state is damaged: {name!r} has no {field!r}{WAY}")
        there, here = tuple(its["shape"]), tuple(layer.weight.shape)
        if there != here:
            raise StateError(
                f"this state is of another model: {name!r} is {there} there and {here} here{WAY}"
            )


def _form(state: Mapping[str, Any]) -> str:
    """What is wrong with it at first sight, or ""."""
    if not isinstance(state, Mapping):
        return f"it is of type {type(state).__name__}"
    for field in ("key", "layers"):
        if field not in state:
            return f"it has no {field!r}"
    if not isinstance(state["key"], int):
        return f"its 'key' is {state['key']!r}, no number"
    if not isinstance(state["layers"], Mapping):
        return f"its 'layers' are of type {type(state['layers']).__name__}, not by the parameter's name"
    return ""
