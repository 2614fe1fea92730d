"""Routes that take only tensors of certain optimisers, such as Muon's matrices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from laconic.core.errors import AttachError
from laconic.core.layout import Entry, Layout
from laconic.exchange.method import Method, Route, Takes, everything
from laconic.exchange.rule import OptimiserSide, Rule
from laconic.reducers.sum import Sum


def limited(method: Method, layout: Layout, optimisers: OptimiserSide) -> Method:
    """Return the method with each rule's route limited to tensors that the rule can step.

    Others take the next route, or are summed. Tensors without an optimiser stay in their route. Raises
    `AttachError` if a rule can step none of its tensors.
    """
    parts = []
    for route, part in zip(method.routes, method.assign(layout), strict=True):
        others = () if route.rule is None else [*_others(route.rule, part, optimisers)]
        if len(part) and len(others) == len(part):
            assert route.rule is not None
            raise AttachError(
                f"{method} needs {route.rule.wants}, and no optimiser holds {part.names[0]} (tensors in all:"
                f" {len(part)}) in this way: pass such an optimiser, alone or in a list with others"
            )
        parts.append(replace(route, takes=_Except(route.takes, frozenset(others))) if others else route)
    if all(new is old for new, old in zip(parts, method.routes, strict=True)):
        return method
    return replace(method, routes=(*parts, Route(everything, Sum())))


def _others(rule: Rule, part: Layout, optimisers: OptimiserSide) -> Iterable[str]:
    for view, own in optimisers.views(part):
        yield from (name for name in own.names if view.holds(name) and not rule.steps(view.settings(name)))


@dataclass(frozen=True)
class _Except:
    takes: Takes
    names: frozenset[str]

    def __call__(self, entry: Entry, model: Layout) -> bool:
        return entry.name not in self.names and self.takes(entry, model)
