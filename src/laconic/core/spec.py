"""Spec strings: a Python call expression over registered names, read with `ast` and never evaluated.

A spec is a frozen dataclass whose `repr` is its call: `parse(repr(x)) == x`. A name is found by its module or
package (`codecs/cast.py` holds `cast`, `reducers/deft/` holds `deft` and `micro`), then by the entry point
`laconic.methods` of an installed package.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import pkgutil
import threading
from abc import ABC
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, ClassVar, Literal, Protocol, cast, runtime_checkable

from laconic.core.aliases import canonical_names
from laconic.core.errors import SpecError

SPEC_PACKAGES = (
    "laconic.codecs",
    "laconic.codecs.selectors",
    "laconic.codecs.indices",
    "laconic.feedback",
    "laconic.reducers",
    "laconic.strategies.gossip",
    "laconic.strategies.gossip.topologies",
    "laconic.strategies.local_steps",
    "laconic.strategies.leaders",
    "laconic.data.partition",
    "laconic.federated.samplings",
    "laconic.federated.schemes",
    "laconic.methods",
    "laconic.pipeline.codings",
    "laconic.replicator.deployments",
)
MIXED_PACKAGES = ("laconic.lowbit", "laconic.sparsity", "laconic.activations", "laconic.admm")
"""Packages in which some files define a name and others are helpers."""

READING = threading.Lock()  # ast.parse in several threads can fail (CPython 3.11)
LONGEST = 10_000

# verified or partial: checked against public code. recalled: standard knowledge, not checked against code.
# reconstruction: only the abstract was available. own: no paper.
Status = Literal["verified", "partial", "recalled", "reconstruction", "own"]


@runtime_checkable
class Maker(Protocol):
    """Callable that a spec string can name."""

    name: str

    def __call__(self, *positional: Any, **named: Any) -> Any: ...


class Spec(ABC):
    """Base of every frozen dataclass that a spec string can name.

    `name` is its name in a spec: by default that of its module. `examples` are spec strings for tests and
    the table of methods, by default the bare name. `paper` is the source, `status` says how the
    implementation was checked, and `code` names the public repository used for that. The default `status`
    is meant for third-party packages.
    """

    name: ClassVar[str]
    examples: ClassVar[tuple[str, ...]] = ()
    paper: ClassVar[str] = "-"
    status: ClassVar[Status] = "own"
    code: ClassVar[str] = "-"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in cls.__dict__:
            cls.name = cls.__module__.rpartition(".")[2]

    @property
    def warm_at(self) -> int:
        """First step after the warm-up, or 0."""
        values = (getattr(self, field.name) for field in fields(cast(Any, self)))
        return max((value.warm_at for value in values if isinstance(value, Spec)), default=0)

    def __repr__(self) -> str:
        return call_text(self.name, self)


def call_text(name: str, value: Any) -> str:
    """Return the call `name(...)` that creates `value`, without default arguments."""
    arguments: list[str] = []
    for position, field in enumerate(fields(value)):
        given = getattr(value, field.name)
        if field.default is not MISSING and given == field.default:
            continue
        if field.default_factory is not MISSING and given == field.default_factory():
            continue
        leading = position == 0 and isinstance(given, Spec)
        arguments.append(repr(given) if leading else f"{field.name}={given!r}")
    return f"{name}({', '.join(arguments)})"


def parse(text: str) -> Any:
    """Return the object that a spec string describes.

    >>> parse("sparse(topk(density=0.01), indices=golomb())")
    sparse(topk(density=0.01), indices=golomb())

    Args:
        text: A call over registered names with literal arguments, or a bare name.

    Returns:
        A codec, selector, reducer, method, strategy, topology or other registered object.

    Raises:
        SpecError: The text is not such a call, has an unknown name or an invalid argument.
    """
    if not isinstance(text, str):
        raise SpecError(f"a spec must be a string such as 'topk(density=0.01)', got {type(text).__name__}")
    if len(text) > LONGEST:
        raise SpecError(f"a spec must have at most {LONGEST} characters, got {len(text)}")
    try:
        with READING:
            tree = ast.parse(text.strip(), mode="eval")
        return _build(tree.body, text)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        reason = getattr(error, "msg", None) or error
        raise SpecError(
            f"cannot read the spec {_short(text)}: {reason}; write a call, as in topk(density=0.01)"
        ) from None


def _build(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str, bool, type(None))):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _build(node.operand, text)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(_build(item, text) for item in node.elts)
    if isinstance(node, ast.Dict):
        return _dict(node, text)
    if isinstance(node, ast.Name):
        return _call(node.id, (), {})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if any(isinstance(item, ast.Starred) for item in node.args) or any(
            k.arg is None for k in node.keywords
        ):
            raise SpecError(f"a spec cannot have * or ** arguments: {_short(text)}")
        names = [keyword.arg for keyword in node.keywords]
        for name in names:
            if names.count(name) > 1:
                raise SpecError(f"{name!r} is given twice in {_short(text)}: give it once")
        named = {keyword.arg: _build(keyword.value, text) for keyword in node.keywords if keyword.arg}
        return _call(node.func.id, tuple(_build(item, text) for item in node.args), named)
    raise SpecError(
        f"a spec may contain only calls, numbers, strings, lists and dicts, got {_short(ast.unparse(node))}"
        f" in {_short(text)}"
    )


def _dict(node: ast.Dict, text: str) -> dict[str, Any]:
    built: dict[str, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
            shown = "**" if key is None else _short(ast.unparse(key))
            raise SpecError(f"the keys of a dict must be strings, got {shown} in {_short(text)}")
        if key.value in built:
            raise SpecError(f"the keys of a dict must be unique, got {key.value!r} twice in {_short(text)}")
        built[key.value] = _build(value, text)
    return built


def _call(name: str, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    make = find(name)
    signature = inspect.signature(make)
    if unknown := [key for key in named if key not in signature.parameters]:
        raise SpecError(
            f"{name}: got an unexpected keyword argument {unknown[0]!r}; it takes"
            f" {name}{signature_text(make)}"
        )
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        raise SpecError(f"{name}: {error}; it takes {name}{signature_text(make)}") from None
    try:
        return make(*positional, **named)
    except TypeError as error:
        raise SpecError(f"{name}: {error}; it takes {name}{signature_text(make)}") from error
    except SpecError as error:
        if str(error).startswith(name):
            raise
        raise SpecError(f"{name}: {error}") from error


def signature_text(make: Callable[..., Any]) -> str:
    """Return the arguments of a registered name with their defaults.

    >>> signature_text(find("sparse"))
    '(select, values=dense(), indices=raw32())'
    """
    built = {
        field.name: field.default_factory()
        for field in (fields(make) if is_dataclass(make) else ())
        if field.default_factory is not MISSING
    }
    parameters = [
        parameter.replace(
            annotation=inspect.Parameter.empty, default=built.get(parameter.name, parameter.default)
        )
        for parameter in inspect.signature(make).parameters.values()
    ]
    return str(inspect.Signature(parameters))


def find(name: str) -> Callable[..., Any]:
    """Return the class or `Maker` of a registered name. Raises `SpecError`, with near matches."""
    home = modules().get(name)
    own = None if home is None else own_maker(importlib.import_module(home), name)
    if own is not None:
        return own
    for entry in entry_points(group="laconic.methods", name=name):
        loaded: Callable[..., Any] = entry.load()
        return loaded
    raise SpecError(f"unknown name {name!r}: {_hint(name)}")


def _hint(name: str) -> str:
    if known := canonical_names(name):
        return f"here it is called {' or '.join(known)}"
    near = difflib.get_close_matches(name.lower(), names(), n=3)
    return f"did you mean {' or '.join(near)}?" if near else "see `laconic methods` for all names"


def names() -> tuple[str, ...]:
    own = [name for name, home in modules().items() if own_maker(importlib.import_module(home), name)]
    return tuple(sorted({*own, *(entry.name for entry in entry_points(group="laconic.methods"))}))


@lru_cache(maxsize=1)
def modules() -> dict[str, str]:
    homes: dict[str, str] = {}
    for package in (*SPEC_PACKAGES, *MIXED_PACKAGES):
        top, *below = package.split(".")
        for root in importlib.import_module(top).__path__:
            folder = "/".join((root, *below))
            for name, is_package in _inside(package, folder):
                homes.setdefault(name, f"{package}.{name}")
                for inner, _ in _inside(f"{package}.{name}", f"{folder}/{name}") if is_package else ():
                    homes.setdefault(inner, f"{package}.{name}.{inner}")
    return homes


def _inside(package: str, folder: str) -> list[tuple[str, bool]]:
    found = [(module.name, module.ispkg) for module in pkgutil.iter_modules([folder])]
    return [(name, is_package) for name, is_package in found if f"{package}.{name}" not in SPEC_PACKAGES]


def own_maker(module: ModuleType, name: str) -> Callable[..., Any] | None:
    for value in vars(module).values():
        # its module first: in Python 3.10 issubclass refuses `list[int]`, an instance of `type`
        own = isinstance(value, type) and value.__module__ == module.__name__ and issubclass(value, Spec)
        if own and value.name == name and not inspect.isabstract(value):
            return cast("Callable[..., Any]", value)
    other = vars(module).get(name)
    if isinstance(other, Maker) and not isinstance(other, type) and other.name == name:
        return other
    return None


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
