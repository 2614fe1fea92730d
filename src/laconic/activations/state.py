"""State of a session by parameter name, and its validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from laconic.activations.coding import CodingRule
from laconic.activations.layer import STATE, Layer
from laconic.core.errors import StateError

HINT = ": load the `state_dict()` of a session of this model"


def to_dict(layers: Iterable[Layer], key: int, coding: CodingRule) -> dict[str, Any]:
    each = {layer.name: {"shape": tuple(layer.weight.shape), **layer.state()} for layer in layers}
    return {"coding": repr(coding), "key": key, "layers": each}


def check(state: Mapping[str, Any], layers: Iterable[Layer]) -> None:
    """Raise `StateError` unless this state is of layers with these names and shapes."""
    wrong = _find_fault(state)
    if wrong:
        raise StateError(f"this is not a state of activations: {wrong}{HINT}")
    theirs, ours = state["layers"], {layer.name: layer for layer in layers}
    for have, lack, whose in ((theirs, ours, "it has"), (ours, theirs, "it lacks")):
        names = [repr(name) for name in have if name not in lack]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise StateError(f"this state is of another model: {whose} {', '.join(names[:3])}{more}{HINT}")
    for name, layer in ours.items():
        its = theirs[name] if isinstance(theirs[name], Mapping) else {}
        for field in ("shape", *STATE):
            if field not in its:
                raise StateError(f"this state is damaged: {name!r} has no {field!r}{HINT}")
        there, here = tuple(its["shape"]), tuple(layer.weight.shape)
        if there != here:
            differs = f"{name!r} is {there} in the state and {here} here"
            raise StateError(f"this state is of another model: {differs}{HINT}")


def _find_fault(state: Mapping[str, Any]) -> str:
    if not isinstance(state, Mapping):
        return f"it is of type {type(state).__name__}"
    for field in ("key", "layers"):
        if field not in state:
            return f"it has no {field!r}"
    if not isinstance(state["key"], int):
        return f"its 'key' is {state['key']!r}, not an integer"
    if not isinstance(state["layers"], Mapping):
        return f"its 'layers' are of type {type(state['layers']).__name__}, not a dict by parameter name"
    return ""
