"""Leaves of pytrees: tensors and numbers in dicts, whose keys are sorted, lists and tuples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Pytree = Any
NUMBERS: dict[str, tuple[torch.dtype, Callable[[Tensor], Any]]] = {
    "float": (torch.float64, lambda x: float(x.detach())),
    "int": (torch.int64, int),
    "bool": (torch.int64, bool),
}


@dataclass(frozen=True)
class Structure:
    """A pytree without its tensors; leaves are sorted by path.

    `places`: position of each leaf in `spec`. `kinds`: "none", "tensor", or a key of `NUMBERS`.
    """

    spec: pytree.TreeSpec
    places: tuple[int, ...]
    kinds: tuple[str, ...]
    text: str = ""

    def __str__(self) -> str:
        return self.text

    def rebuilt(self, tensors: Iterable[Tensor]) -> Pytree:
        left, leaves = iter(tensors), dict.fromkeys(self.places)
        for place, kind in zip(self.places, self.kinds, strict=True):
            if kind != "none":
                leaves[place] = NUMBERS[kind][1](next(left)) if kind in NUMBERS else next(left)
        return pytree.tree_unflatten([leaves[place] for place in sorted(leaves)], self.spec)

    def to_json(self) -> str:
        try:
            spec = pytree.treespec_dumps(self.spec)
            if pytree.treespec_loads(spec) == self.spec:
                return json.dumps([spec, self.places, self.kinds])
        except TypeError:
            pass
        raise TypeError(
            f"dicts of a batch that is cut among replicas have strings and numbers as keys, got {self.text}:"
            " rename the keys"
        )

    @classmethod
    def from_json(cls, text: str) -> Structure:
        spec, places, kinds = json.loads(text)
        return cls(pytree.treespec_loads(spec), tuple(places), tuple(kinds))


def flatten(tree: Pytree, *, exact: bool = False) -> tuple[list[Tensor], Structure]:
    """Return the tensors of a pytree in sorted order, and its structure.

    `exact`: keep integers and bools, which otherwise become floats.

    >>> tensors, structure = flatten({"b": 2.0, "a": [torch.ones(3), None]})
    >>> [each.tolist() for each in tensors], str(structure)
    ([[1.0, 1.0, 1.0], 2.0], "['a'][0] float32 (3,), ['a'][1] none, ['b'] float")
    >>> structure.rebuilt(tensors)
    {'b': 2.0, 'a': [tensor([1., 1., 1.]), None]}
    """
    leaves, spec = pytree.tree_flatten_with_path(tree)
    places = sorted(range(len(leaves)), key=lambda i: [_key(entry) for entry in leaves[i][0]])
    tensors, kinds, texts = list[Tensor](), [], []
    for path, leaf in (leaves[i] for i in places):
        kind = _kind(leaf, exact)
        if kind in NUMBERS:
            tensors.append(torch.tensor(leaf, dtype=NUMBERS[kind][0], device="cpu"))
        elif kind == "tensor":
            tensors.append(leaf)
        shown = f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}" if kind == "tensor" else kind
        kinds.append(kind)
        texts.append(f"{pytree.keystr(path)} {shown}".lstrip())
    return tensors, Structure(spec, tuple(places), tuple(kinds), ", ".join(texts))


def _kind(leaf: Any, exact: bool) -> str:
    if leaf is None:
        return "none"
    if isinstance(leaf, Tensor):
        return "tensor"
    if isinstance(leaf, int | float):
        if not exact or isinstance(leaf, float):
            return "float"
        return "bool" if isinstance(leaf, bool) else "int"
    if isinstance(leaf, Mapping | list | tuple):
        kind = "dict" if isinstance(leaf, Mapping) else "list" if isinstance(leaf, list) else "tuple"
        raise TypeError(
            f"{type(leaf).__name__} is a class of its own, and a pytree has plain dicts, lists and tuples:"
            f" give {kind}(...) of it"
        )
    raise TypeError(
        "a leaf of a pytree must be a tensor, a number or None, in dicts, lists and tuples, got"
        f" {type(leaf).__name__}: pass only its tensors"
    )


def _key(entry: Any) -> tuple[str, Any]:
    if isinstance(entry, pytree.MappingKey):
        return type(entry.key).__name__, str(entry.key)
    return "", entry.idx if isinstance(entry, pytree.SequenceKey) else str(entry)


def with_plain_tuples(tree: Pytree) -> Pytree:
    """Replace named tuples, whose classes other processes may lack, by plain ones."""

    def is_named(node: Any) -> bool:
        return isinstance(node, tuple) and hasattr(node, "_fields")

    def plain(leaf: Any) -> Any:
        return tuple(map(with_plain_tuples, leaf)) if is_named(leaf) else leaf

    return pytree.tree_map(plain, tree, is_leaf=is_named)
