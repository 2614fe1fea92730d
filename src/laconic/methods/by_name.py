"""Tensors by their names: embeddings one way, norms another, the rest a third."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from laconic.codecs.dense import Dense
from laconic.core.errors import SpecError
from laconic.core.layout import Entry, Layout
from laconic.strategies.method import Method, everything, method
from laconic.strategies.policy import share_out

DENSE = Dense()


@method(
    paper="-",
    status="-",
    sends="what the method for each tensor's name sends",
    examples=("by_name({'*weight': topk(density=0.01)}, rest=dense())",),
)
def by_name(names: Mapping[str, Any], *, rest: Any = DENSE) -> Method:
    """`names`: pattern of tensor names to a spec; the first pattern that matches wins, `rest` has no match.

    In a pattern `*` is any text, `?` one character, `[ab]` one of these; upper and lower case differ. Specs
    are all that `compress` takes; a codec, selector or reducer leaves tensors of one dimension dense, as
    everywhere. A pattern that gets no tensor of the model, as none matches or earlier patterns take them all,
    is refused when it is attached. Payload: that of all.

    >>> from laconic.core.spec import parse
    >>> parse("by_name({'*embed*': cast('fp16'), '*norm*': dense()}, rest=topk(density=0.01))")
    by_name(names={'*embed*': cast(dtype='fp16'), '*norm*': dense()}, rest=topk(density=0.01))
    """
    if not isinstance(names, Mapping) or not all(isinstance(pattern, str) for pattern in names):
        raise SpecError(f"by_name takes a dict such as {{'*norm*': dense()}}, got {names!r}")
    if not names:
        raise SpecError(f"by_name needs a pattern, such as {{'*norm*': dense()}}, got {{}}; or take {rest!r}")
    patterns = tuple(names)
    arms = [(_Named(pattern, patterns), spec) for pattern, spec in names.items()]
    return share_out(*arms, (everything, rest))


@dataclass(frozen=True)
class _Named:
    """The tensors whose names match a pattern, and none of those before it."""

    pattern: str
    patterns: tuple[str, ...]

    def __call__(self, entry: Entry, model: Layout) -> bool:
        return _matches(model.names, self.patterns).get(entry.name) == self.pattern


@lru_cache(maxsize=64)
def _matches(names: tuple[str, ...], patterns: tuple[str, ...]) -> dict[str, str]:
    """The first pattern that matches each name. One that is the first for no name is a slip of the pen."""
    first: dict[str, str] = {}
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise SpecError(
                f"by_name: no tensor of this model matches {pattern!r}; it has {len(names)}: {shown}"
                " (embeddings with sparse gradients are not among them)"
            )
        if all(name in first for name in found):
            earlier = " and ".join(repr(own) for own in dict.fromkeys(first[name] for name in found))
            raise SpecError(
                f"by_name: all tensors that match {pattern!r} go to {earlier}, which come first: put"
                f" {pattern!r} before, or leave it out"
            )
        for name in found:
            first.setdefault(name, pattern)
    return first
