"""Nests: tensors in dicts, lists and tuples, taken apart in one order on every replica.

A dict is read by its keys in sorted order, however it was filled: collectives then meet the same tensors
everywhere. Numbers come back as floats, or as what they were where `kept` says so; None stays None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Nest = Any  # a tensor or a number, None, or a dict, list or tuple of nests
NUMBERS: dict[str, tuple[torch.dtype, Callable[[Tensor], Any]]] = {
    "number": (torch.float64, lambda x: float(x.detach())),
    "whole": (torch.int64, int),
    "flag": (torch.int64, bool),
}


@dataclass(frozen=True)
class Structure:
    """What a nest is without the values of its tensors. `kind`: tensor, none, dict, list or tuple, or of
    `NUMBERS`.

    `keys`: of a dict, in their own order. `parts`: what is inside; of a dict, in sorted order of the keys.
    `dtype`, `shape`: of a tensor. `make`: builds a named tuple.
    """

    kind: str
    parts: tuple[Structure, ...] = ()
    keys: tuple[Any, ...] = ()
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    make: Callable[..., Any] | None = None

    def __str__(self) -> str:
        if self.kind == "tensor":
            return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"
        if self.kind == "dict":
            pairs = zip(ordered(self.keys), self.parts, strict=True)
            return "{" + ", ".join(f"{key!r}: {part}" for key, part in pairs) + "}"
        inside = ", ".join(map(str, self.parts))
        return {"list": f"[{inside}]", "tuple": f"({inside})"}.get(self.kind, self.kind)

    def rebuilt(self, leaves: Iterator[Tensor]) -> Nest:
        """The nest with these tensors inside, in order."""
        if self.kind == "tensor":
            return next(leaves)
        if self.kind in NUMBERS:
            return NUMBERS[self.kind][1](next(leaves))
        parts = [part.rebuilt(leaves) for part in self.parts]
        if self.kind == "dict":
            found = dict(zip(ordered(self.keys), parts, strict=True))
            return {key: found[key] for key in self.keys}
        if self.kind == "tuple":
            return tuple(parts) if self.make is None else self.make(*parts)
        return parts if self.kind == "list" else None

    def to_json(self) -> Any:
        """As lists and strings; a named tuple becomes a tuple. Raises `TypeError` for keys of other kinds."""
        if self.kind == "tensor":
            return ["tensor", str(self.dtype).removeprefix("torch."), list(self.shape)]
        if any(not isinstance(key, str) for key in self.keys):
            raise TypeError(f"a dict that is sent to other replicas has strings as keys, got {self.keys!r}")
        return [self.kind, list(self.keys), [part.to_json() for part in self.parts]]

    @classmethod
    def from_json(cls, told: Any) -> Structure:
        """What `to_json` told."""
        if told[0] == "tensor":
            return cls("tensor", dtype=getattr(torch, told[1]), shape=tuple(told[2]))
        return cls(told[0], tuple(map(cls.from_json, told[2])), tuple(told[1]))

    @property
    def leaves(self) -> list[Structure]:
        """The tensors inside, and numbers as 0-dim tensors of float64 or int64, in order."""
        if self.kind == "tensor":
            return [self]
        if self.kind in NUMBERS:
            return [Structure("tensor", dtype=NUMBERS[self.kind][0])]
        return [leaf for part in self.parts for leaf in part.leaves]


def flatten(nest: Nest, *, kept: bool = False) -> tuple[list[Tensor], Structure]:
    """The tensors of a nest in one order, and its structure. Raises `TypeError` for what is no nest.

    `kept`: whole numbers and flags stay what they are; else all numbers are floats, as for a mean.

    >>> tensors, structure = flatten({"b": 2.0, "a": [torch.ones(3), None]})
    >>> [each.tolist() for each in tensors], str(structure)
    ([[1.0, 1.0, 1.0], 2.0], "{'a': [float32 (3,), none], 'b': number}")
    >>> structure.rebuilt(iter(tensors))
    {'b': 2.0, 'a': [tensor([1., 1., 1.]), None]}
    """
    if isinstance(nest, Tensor):
        return [nest], Structure("tensor", dtype=nest.dtype, shape=tuple(nest.shape))
    if kept and isinstance(nest, int):
        return [torch.tensor(int(nest), dtype=torch.int64, device="cpu")], Structure(
            "flag" if isinstance(nest, bool) else "whole"
        )
    if isinstance(nest, int | float):
        return [torch.tensor(float(nest), dtype=torch.float64, device="cpu")], Structure("number")
    if nest is None:
        return [], Structure("none")
    if isinstance(nest, dict):
        tensors, parts = _each([nest[key] for key in ordered(nest)], kept)
        return tensors, Structure("dict", parts, tuple(nest))
    if isinstance(nest, list | tuple):
        tensors, parts = _each(nest, kept)
        if isinstance(nest, list):
            return tensors, Structure("list", parts)
        return tensors, Structure("tuple", parts, make=type(nest) if hasattr(nest, "_fields") else None)
    raise TypeError(
        "a nest is a tensor, a number, None, or a dict, list or tuple of nests, got"
        f" {type(nest).__name__}: give its tensors alone"
    )


def _each(nests: Sequence[Nest], kept: bool) -> tuple[list[Tensor], tuple[Structure, ...]]:
    found = [flatten(nest, kept=kept) for nest in nests]
    return [tensor for tensors, _ in found for tensor in tensors], tuple(structure for _, structure in found)


def ordered(keys: Any) -> list[Any]:
    """Keys of a dict in one order on every replica."""
    return sorted(keys, key=lambda key: (type(key).__name__, str(key)))


def told(structure: Structure) -> str:
    """A structure as JSON."""
    return json.dumps(structure.to_json())
