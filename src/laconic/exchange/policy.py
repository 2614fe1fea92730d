"""Policy: several methods on one model, each for some of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from laconic.core.layout import Entry, Layout
from laconic.exchange.method import Method, Route, Takes, lift, routes


def split(*arms: tuple[Takes, Any]) -> Method:
    """Return a method that sends each tensor to the first arm, (condition, spec), that accepts it.

    Equal routes share collectives.
    """
    wanted: list[Takes] = []
    alike: list[tuple[Route, list[int]]] = []
    for wants, spec in arms:
        for route in lift(spec).routes:
            same = next((own for other, own in alike if route == other), None)  # `takes` is not compared
            if same is None:
                alike.append((route, [len(wanted)]))
            else:
                same.append(len(wanted))
            wanted.append(_Both(wants, route.takes))
    order = tuple(wanted)
    return routes(*(replace(route, takes=_First(order, frozenset(own))) for route, own in alike))


@dataclass(frozen=True)
class _Both:
    one: Takes
    other: Takes

    def __call__(self, entry: Entry, model: Layout) -> bool:
        return self.one(entry, model) and self.other(entry, model)


@dataclass(frozen=True)
class _First:
    order: tuple[Takes, ...]
    own: frozenset[int]

    def __call__(self, entry: Entry, model: Layout) -> bool:
        return next((i for i, wants in enumerate(self.order) if wants(entry, model)), None) in self.own
