"""Methods by tensor name: for example one for embeddings, another for norms, a third for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from laconic.codecs.dense import Dense
from laconic.core.errors import SpecError
from laconic.core.layout import Entry, Layout
from laconic.exchange.method import Method, everything, lift, method
from laconic.exchange.policy import split

DENSE = Dense()


@method(
    paper="-",
    status="own",
    sends="the payload of the method chosen by each tensor's name",
    examples=("by_name({'*weight': topk(density=0.01)}, rest=dense())",),
)
def by_name(names: Mapping[str, Any], *, rest: Any = DENSE) -> Method:
    """Apply one method per pattern of tensor names. Payload: the sum of their payloads.

    In a pattern, `*` is any text, `?` one character, `[ab]` one of these; case matters. A codec, selector or
    reducer leaves one-dimensional tensors dense.

    Args:
        names: Patterns to any specs that `compress` accepts; the first match wins.
        rest: The spec for other tensors.

    Raises:
        SpecError: `names` is not a dict of patterns; or, on attaching, a pattern gets no tensor.

    >>> from laconic.core.spec import parse
    >>> parse("by_name({'*embed*': cast('fp16'), '*norm*': dense()}, rest=topk(density=0.01))")
    by_name(names={'*embed*': cast(dtype='fp16'), '*norm*': dense()}, rest=topk(density=0.01))
    """
    if not isinstance(names, Mapping) or not all(isinstance(pattern, str) for pattern in names):
        raise SpecError(f"by_name: names must be a dict such as {{'*norm*': dense()}}, got {names!r}")
    if not names:
        raise SpecError(f"by_name: names must have a pattern, such as {{'*norm*': dense()}}; or use {rest!r}")
    patterns = tuple(names)
    arms = [(_Named(pattern, patterns), _lifted(spec, repr(pattern))) for pattern, spec in names.items()]
    return split(*arms, (everything, _lifted(rest, "rest")))


def _lifted(spec: Any, where: str) -> Method:
    try:
        return lift(spec)
    except SpecError as error:
        raise SpecError(f"by_name: {where}: {error}") from error


@dataclass(frozen=True)
class _Named:
    pattern: str
    patterns: tuple[str, ...]

    def __call__(self, entry: Entry, model: Layout) -> bool:
        return _matches(model.names, self.patterns).get(entry.name) == self.pattern


@lru_cache(maxsize=64)
def _matches(names: tuple[str, ...], patterns: tuple[str, ...]) -> dict[str, str]:
    first: dict[str, str] = {}
    for pattern in patterns:
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise SpecError(
                f"by_name: no tensor of this model matches {pattern!r}; it has {len(names)}: {shown}"
                " (not counting embeddings with sparse gradients)"
            )
        if all(name in first for name in found):
            earlier = " and ".join(repr(own) for own in dict.fromkeys(first[name] for name in found))
            raise SpecError(
                f"by_name: all tensors that match {pattern!r} go to {earlier}, which come first: move"
                f" {pattern!r} before them, or remove it"
            )
        for name in found:
            first.setdefault(name, pattern)
    return first
