"""The example's app: as a Flower user writes it, and what two lines make of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.flower.example_world import compared

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    from digits_app import task

    monkeypatch.setattr(task, "examples", cache(task.examples))  # each client draws its own anew otherwise
    yield
    for name in [name for name in sys.modules if name.startswith("digits_app")]:
        del sys.modules[name]


@pytest.mark.usefixtures("example")
def test_two_lines_make_it_fifty_times_cheaper() -> None:
    found = compared()
    assert found.plain_nbytes / found.nbytes > 50
    assert found.accuracy > found.plain_accuracy - 0.03
