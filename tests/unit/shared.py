"""Tables of cases inside one test, refusals, and laws that many unit tests share."""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def for_each(names: str, rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test for every row of a table, as one test: a failure names the row.

    `names` are the arguments that a row fills, separated by commas. Rows share the fixtures, except that
    `monkeypatch` is undone after each. Decorators in a stack loop over the product of their rows.

    >>> @for_each("base, exponent, power", [(2, 3, 8), (3, 2, 8)])
    ... def test_powers(base, exponent, power):
    ...     assert base**exponent == power
    >>> test_powers()
    Traceback (most recent call last):
        ...
    AssertionError: at base=3, exponent=2, power=8: AssertionError()
    """
    keys, table = [name.strip() for name in names.split(",")], list(rows)
    assert table, f"no rows for {names}"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        fixtures = [each for each in signature.parameters.values() if each.name not in keys]

        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            for row in table:
                case = dict(zip(keys, row if len(keys) > 1 else (row,), strict=True))
                try:
                    test(*args, **kwargs, **case)
                except (Exception, pytest.fail.Exception) as error:
                    named = ", ".join(f"{key}={value!r}" for key, value in case.items())
                    raise AssertionError(f"at {named}: {error!r}") from error
                finally:
                    if "monkeypatch" in kwargs:
                        kwargs["monkeypatch"].undo()

        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate


def refuses(
    kind: type[Exception] | tuple[type[Exception], ...],
    words: str,
    act: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> None:
    """Assert that `act(*args, **options)` raises this kind of error with a message that matches `words`."""
    with pytest.raises(kind, match=words):
        act(*args, **options)


def flat(model: nn.Module) -> Tensor:
    """All parameters of a model as one vector."""
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def same(ones: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Whether two series of tensors, of one length, are equal."""
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def through_file(state: Any) -> Any:
    """A state as it is after it has been saved and loaded."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(
    start: Callable[[], Sequence[Any]], train: Callable[[Sequence[Any], range], Any], stop: int, steps: int
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Parts that trained without a stop, and parts that loaded the states of others after `stop` steps.

    `start()` makes the parts, such as (model, optimizer, handle); `train(parts, range)` trains them.
    """
    unbroken, stopped, later = start(), start(), start()
    train(unbroken, range(steps))
    train(stopped, range(stop))
    states = through_file([part.state_dict() for part in stopped])
    for part, state in zip(later, states, strict=True):
        part.load_state_dict(state)
    train(later, range(stop, steps))
    return unbroken, later
