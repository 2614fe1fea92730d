"""Commands whose flags are the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field
from inspect import Parameter, Signature
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from laconic.tools.tasks.options import flag, info, options

T = TypeVar("T")


def command(of: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:

    def decorate(function: Callable[[T], None]) -> Callable[..., None]:
        kinds = get_type_hints(of)
        parameters = [_parameter(each, kinds[each.name]) for each in options(of)]

        def run(**given: Any) -> None:
            texts = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
            function(of(**(given | texts)))

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _parameter(each: Field[Any], kind: Any) -> Parameter:
    said = info(each)
    information: Any
    if each.default is MISSING:
        information, default = typer.Argument(help=said.help), Parameter.empty
    else:
        information = typer.Option(
            flag(each), help=said.help, rich_help_panel=said.group, metavar=said.metavar
        )
        default = [] if each.default == () else each.default
    return Parameter(
        each.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[_plain(kind), information]
    )


def _plain(kind: Any) -> Any:
    if get_origin(kind) is Literal:
        return str
    if get_origin(kind) is tuple:
        return list[str]
    if len(parts := get_args(kind)) == 2 and type(None) in parts:
        return Union[_plain(next(each for each in parts if each is not type(None))), None]  # noqa: UP007
    return kind
