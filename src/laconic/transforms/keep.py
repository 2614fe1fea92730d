"""Argument `keep=`: names of modules that a transform leaves unchanged, with their children."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from torch import nn

from laconic.core.errors import AttachError


def check_keep(modules: Mapping[str, nn.Module], keep: Collection[str]) -> None:
    if isinstance(keep, str):
        raise AttachError(f"keep takes a collection of names, and got {keep!r} alone: keep=({keep!r},)")
    for name in keep:
        if name not in modules:
            near = difflib.get_close_matches(name, modules, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see model.named_modules()"
            raise AttachError(f"keep: this model has no module {name!r}: {hint}")


def is_kept(name: str, keep: Collection[str]) -> bool:
    """Return whether `keep` has the name of this module or of one around it.

    >>> is_kept("head.0", ("head",)), is_kept("header", ("head",))
    (True, False)
    """
    return "" in keep or name in keep or name.startswith(tuple(f"{each}." for each in keep))
