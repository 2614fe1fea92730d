"""Policy: several methods on one model, each for some of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from laconic.core.layout import Entry, Layout
from laconic.strategies.method import Method, Route, Takes, lift, routes


def share_out(*arms: tuple[Takes, Any]) -> Method:
    """A method that has no name yet: a tensor goes to the first arm that wants it.

    An arm is what it wants, and the spec of a method. Routes that are alike become one, so that they share
    their collectives.
    """
    wanted: list[Takes] = []
    alike: list[tuple[Route, list[int]]] = []
    for wants, spec in arms:
        for route in lift(spec).routes:
            same = next((own for other, own in alike if _alike(route, other)), None)
            if same is None:
                alike.append((route, [len(wanted)]))
            else:
                same.append(len(wanted))
            wanted.append(_Both(wants, route.takes))
    order = tuple(wanted)
    return routes(*(replace(route, takes=_First(order, frozenset(own))) for route, own in alike))


def _alike(one: Route, other: Route) -> bool:
    return (one.reducer, one.feedback, one.rule) == (other.reducer, other.feedback, other.rule)


@dataclass(frozen=True)
class _Both:
    """The tensors that both want."""

    one: Takes
    other: Takes

    def __call__(self, entry: Entry, model: Layout) -> bool:
        return self.one(entry, model) and self.other(entry, model)


@dataclass(frozen=True)
class _First:
    """The tensors that, of all in `order`, one of `own` is the first to want."""

    order: tuple[Takes, ...]
    own: frozenset[int]

    def __call__(self, entry: Entry, model: Layout) -> bool:
        return next((i for i, wants in enumerate(self.order) if wants(entry, model)), None) in self.own
