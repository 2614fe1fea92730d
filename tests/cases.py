"""Loops inside a law: one test runs many cases, and a failure prints the command that reruns only its case.

    @over(spec=specs(Codec), size=(1, 2, 4), layout=LAYOUTS)
    def test_replicas_are_equal(spec, size, layout): ...

One axis or two run in full. With three, the two longest run in full and the third rotates, so that every pair
of values of two axes occurs. `pytest --full` runs the full product of three; `pytest --case size=4` only the
cases that match.
"""

from __future__ import annotations

import inspect
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest

Case = dict[str, tuple[str, Any]]  # axis -> label, value
FAILURES = 3  # cases that a law runs to their failure before it stops
chosen: dict[str, str] = {}  # axis -> label, from --case
full = False  # from --full
_current: dict[str, str] = {}


def over(
    *, where: Callable[..., bool] | None = None, **axes: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test once per case, within one test item. A value's label is its key in a mapping, or its str.

    `where`: called with the values of a case; False leaves the case out.
    """
    values = {name: _labelled(axis) for name, axis in axes.items()}

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            __tracebackhide__ = True
            failures, cases = [], [*_selected(covering(values), where)]
            if not cases:
                pytest.skip("no case is selected")
            for each in cases:
                try:
                    with case(**{name: label for name, (label, _) in each.items()}):
                        test(**{name: value for name, (_, value) in each.items()}, **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(error)
                    if len(failures) == FAILURES:
                        break
            if failures:
                for other in failures[1:]:
                    _note(failures[0], f"{type(other).__name__} too, in {getattr(other, 'case', '')}")
                raise failures[0]

        taken = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature([each for each in taken if each.name not in axes])  # type: ignore[attr-defined]
        return run

    return decorate


def covering(axes: Mapping[str, list[tuple[str, Any]]]) -> Iterator[Case]:
    """Yield cases such that every pair of values of two axes occurs, in the order of the axes.

    >>> [(a, b) for case in covering({"x": [("a", 1)], "y": [("b", 2), ("c", 3)]}) for a, b in case.values()]
    [('a', 1), ('b', 2), ('a', 1), ('c', 3)]
    """
    if full or len(axes) < 3:
        for row in itertools.product(*axes.values()):
            yield dict(zip(axes, row, strict=True))
        return
    first, second, third = sorted(axes, key=lambda name: -len(axes[name]))
    for i, one in enumerate(axes[first]):
        for j, other in enumerate(axes[second]):
            row = {first: one, second: other, third: axes[third][(i + j) % len(axes[third])]}
            yield {name: row[name] for name in axes}


@contextmanager
def case(**labels: Any) -> Iterator[None]:
    """Name a case in the failures of a block, with the command that reruns only this case."""
    outer = dict(_current)
    _current.update({name: str(label) for name, label in labels.items()})
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        if not hasattr(error, "case"):
            error.case = ", ".join(f"{name}={label}" for name, label in _current.items())  # type: ignore[union-attr]
            _note(error, f"in {error.case}; rerun it:\n{_command()}")  # type: ignore[union-attr]
        raise
    finally:
        _current.clear()
        _current.update(outer)


def _labelled(axis: Iterable[Any]) -> list[tuple[str, Any]]:
    return [*axis.items()] if isinstance(axis, Mapping) else [(str(value), value) for value in axis]


def _selected(cases: Iterable[Case], where: Callable[..., bool] | None) -> Iterator[Case]:
    for each in cases:
        if all(chosen.get(name, label) == label for name, (label, _) in each.items()) and (
            where is None or where(**{name: value for name, (_, value) in each.items()})
        ):
            yield each


def _command() -> str:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
    words = ["--full"] if full else []
    for name, label in _current.items():
        words += ["--case", f"{name}={label}"]
    return shlex.join(["python", "-m", "pytest", test, *words])


def _note(error: BaseException, text: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        print(text)
