"""Which modules of a model a conversion leaves as they are: those that `keep=` names, and all inside them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from torch import nn

from laconic.core.errors import AttachError


def check_kept(names: Mapping[str, nn.Module], keep: Collection[str]) -> None:
    """Raise `AttachError` if `keep` is a single string, or names none of these modules."""
    if isinstance(keep, str):
        raise AttachError(f"keep takes a collection of names, and got {keep!r} alone: keep=({keep!r},)")
    for name in keep:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see model.named_modules()"
            raise AttachError(f"keep: this model has no module {name!r}: {hint}")


def is_kept(name: str, keep: Collection[str]) -> bool:
    """Whether the module of this name is one of these, or inside of one.

    >>> is_kept("head.0", ("head",)), is_kept("header", ("head",))
    (True, False)
    """
    return "" in keep or name in keep or name.startswith(tuple(f"{each}." for each in keep))
