"""Method: routes for a model's tensors. A paper is a function that composes routes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, ParamSpec

from laconic.codecs.indices.golomb import GOLOMB
from laconic.codecs.sparse import Sparse
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Entry, Layout
from laconic.core.selector import Selector
from laconic.core.spec import Status, parse
from laconic.exchange.rule import Rule
from laconic.feedback import Feedback
from laconic.feedback.error_feedback import ErrorFeedback, Momentum
from laconic.feedback.no_feedback import NoFeedback
from laconic.reducers import Composition, Reducer
from laconic.reducers.gather import Gather
from laconic.reducers.masked import Masked
from laconic.reducers.sum import Sum
from laconic.reducers.two_level import TwoLevel

Arguments = ParamSpec("Arguments")


Takes = Callable[[Entry, Layout], bool]


@dataclass(frozen=True)
class Route:
    takes: Takes = field(compare=False)
    reducer: Reducer
    feedback: Feedback = field(default_factory=NoFeedback)
    rule: Rule | None = None


def everything(entry: Entry, model: Layout) -> bool:
    return True


def matrices(entry: Entry, model: Layout) -> bool:
    return len(entry.shape) > 1


@dataclass(frozen=True)
class Method(Composition):
    """Routes in order; a tensor takes the first one that accepts it. `text` is the spec string."""

    text: str
    routes: tuple[Route, ...] = field(compare=False)

    def __repr__(self) -> str:
        return self.text

    @property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(dict.fromkeys(route.rule for route in self.routes if route.rule is not None))

    @property
    def warm_at(self) -> int:
        parts = [part for route in self.routes for part in (route.reducer, route.feedback, route.rule)]
        return max((part.warm_at for part in parts if part is not None), default=0)

    @property
    def adaptive(self) -> bool:
        return any(route.reducer.adaptive for route in self.routes)

    @property
    def keeps_equal(self) -> bool:
        return all(rule.keeps_equal for rule in self.rules)

    def governed(self, layout: Layout) -> tuple[tuple[Rule, Layout], ...]:
        names: dict[Rule, set[str]] = {}
        for route, part in zip(self.routes, self.assign(layout), strict=True):
            if route.rule is not None:
                names.setdefault(route.rule, set()).update(part.names)
        return tuple((rule, layout.named(own)) for rule, own in names.items())

    def assign(self, layout: Layout) -> tuple[Layout, ...]:
        parts: list[list[Entry]] = [[] for _ in self.routes]
        for entry in layout:
            home = next((i for i, route in enumerate(self.routes) if route.takes(entry, layout)), None)
            if home is None:
                raise SpecError(
                    f"{self.text}: no route accepts {entry.name!r}; add a last route for everything"
                )
            parts[home].append(entry)
        return tuple(Layout(tuple(part)) for part in parts)

    def nbytes(self, layout: Layout) -> int:
        """Return one rank's payload in bytes: exact, or an upper bound."""
        parts = zip(self.routes, self.assign(layout), strict=True)
        return sum(route.reducer.nbytes(part) for route, part in parts if len(part))


class Paper(Generic[Arguments]):
    """Registered method: call it for a `Method`.

    `paper`, `status` and `code` are as in `Spec`; `sends` describes its messages.
    """

    def __init__(
        self,
        compose: Callable[Arguments, Method],
        paper: str,
        status: Status,
        sends: str,
        examples: tuple[str, ...],
        code: str,
    ) -> None:
        functools.update_wrapper(self, compose)
        self.name = compose.__name__
        self.paper = paper
        self.status = status
        self.sends = sends
        self.examples = examples
        self.code = code
        self._compose = compose
        self.__signature__ = inspect.signature(compose)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Method:
        made = self._compose(*args, **kwargs)
        parameters = self.__signature__.parameters
        given = self.__signature__.bind(*args, **kwargs).arguments
        literal = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        shown = [f"{key}={value!r}" for key, value in literal.items() if value != parameters[key].default]
        return Method(f"{self.name}({', '.join(shown)})", made.routes)


def method(
    *, paper: str, status: Status, sends: str, examples: tuple[str, ...] = (), code: str = "-"
) -> Callable[[Callable[Arguments, Method]], Paper[Arguments]]:
    """Register a function that composes routes. `examples`: spec strings."""
    return lambda compose: Paper(compose, paper, status, sends, examples, code)


def routes(*parts: Route) -> Method:
    return Method("routes()", parts)


def governed_by(rule: Rule, compressor: Any) -> Method:
    """Return `lift(compressor)` with this rule on each route."""

    def with_rule(route: Route) -> Route:
        feedback = route.feedback
        if isinstance(feedback, ErrorFeedback):
            feedback = replace(feedback, momentum="optimizer")
        return replace(route, rule=rule, feedback=feedback)

    return routes(*map(with_rule, plain(compressor, "this method").routes))


def lift(spec: Any) -> Method:
    """Return the method of a spec: a string, a method, a codec, a selector or a reducer.

    A selector becomes `gather(sparse(selector, indices=golomb()))`, a codec `gather(codec)`, with error
    feedback if biased, a reducer a method with error feedback if needed. Tensors of one dimension stay
    dense: few bytes, much of the accuracy. A lossless codec is summed densely.

    Raises:
        SpecError: It is something else.

    >>> [type(route.feedback).__name__ for route in lift("topk(density=0.01)").routes]
    ['ErrorFeedback', 'NoFeedback']
    """
    if isinstance(spec, str):
        spec = parse(spec)
    if isinstance(spec, Method):
        return spec
    text = repr(spec)
    if isinstance(spec, Masked):
        inner = lift(spec.inner)
        return Method(text, tuple(replace(each, reducer=Masked(each.reducer)) for each in inner.routes))
    if isinstance(spec, (Codec, Selector)):
        codec = lift_codec(spec)
        spec = Sum() if codec.lossless else Gather(codec)
    if not isinstance(spec, Reducer):
        raise SpecError(
            f"compress takes a method, codec, selector or reducer, got {text}; a strategy, such as"
            " local_sgd(), goes to laconic.distribute(model, optimizer, spec)"
        )
    if isinstance(spec, Sum):
        return Method(text, (Route(everything, spec),))
    if isinstance(spec, TwoLevel) and isinstance(spec.outer, Method):
        return between_machines(spec, spec.outer)
    feedback = error_feedback(spec) if spec.needs_feedback else NoFeedback()
    return Method(text, (Route(matrices, spec, feedback), Route(everything, Sum())))


def error_feedback(reducer: Reducer, momentum: Momentum = "local") -> ErrorFeedback:
    inner = reducer.reducer if isinstance(reducer, Masked) else reducer
    return ErrorFeedback(momentum=momentum if inner.local_momentum else "optimizer", ahead=inner.ahead)


def between_machines(levels: TwoLevel, outer: Method) -> Method:
    """Return `outer` with its reductions, except plain sums, between machines."""
    for rule in outer.rules:
        if rule.exchanges_in_step:
            raise SpecError(
                f"two_level: {outer} exchanges inside optimizer.step(): use a method that exchanges gradients"
            )

    def moved(route: Route) -> Route:
        if isinstance(route.reducer, Sum):
            return route
        tells = route.feedback.clears_sent
        return replace(route, reducer=replace(levels, outer=route.reducer, tells=tells))

    return Method(repr(levels), tuple(moved(route) for route in outer.routes))


def plain(compressor: Any, taker: str) -> Method:
    """Return `lift(compressor)` for a `taker` that adds feedback or a rule. `SpecError` for a method."""
    if isinstance(compressor, str):
        compressor = parse(compressor)
    if isinstance(compressor, Method) or isinstance(getattr(compressor, "outer", None), Method):
        raise SpecError(f"{taker} takes a codec, selector or reducer, got the method {compressor}")
    return lift(compressor)


def lift_codec(spec: Any) -> Codec:
    """Return the codec of a spec: a string, a codec, or a selector, which becomes `sparse(..., golomb())`.

    Raises `SpecError` for anything else.

    >>> lift_codec("topk(density=0.01)")
    sparse(topk(density=0.01), indices=golomb())
    """
    if isinstance(spec, str):
        spec = parse(spec)
    if isinstance(spec, Selector):
        return Sparse(spec, indices=GOLOMB)
    if isinstance(spec, Codec):
        return spec
    kind = next((f"the {each.__name__.lower()} " for each in (Method, Reducer) if isinstance(spec, each)), "")
    hint = "; that averages over all ranks: name the codec or selector that it sends with" if kind else ""
    raise SpecError(
        f"compressor= takes a codec or selector, such as topk(density=0.1), got {kind}{spec!r}{hint}"
    )
