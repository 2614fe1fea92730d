"""Warnings name the line of the script, whatever lies between it and the line that warns."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.unit.shared import for_each
from torch import nn

import laconic
from laconic.optim import step_watch

SRC = Path(laconic.__file__).parent
PART = """
from contextlib import contextmanager

from laconic.core.inference import outside_inference_mode
from laconic.core.warning import warn


@outside_inference_mode("decorated")
class Part:
    def plain(self):
        warn("look")

    def decorated(self):
        self.plain()

    @contextmanager
    def block(self):
        self.decorated()
        yield
"""


def part() -> Any:
    """Return an object of Laconic whose methods warn."""
    names: dict[str, Any] = {"__name__": "laconic.part"}
    exec(PART, names)
    return names["Part"]()


def line() -> int:
    """Return the caller's line."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def places(act: Callable[[], object]) -> set[tuple[str, int]]:
    """Return file and line of each warning."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act()
    return {(each.filename, each.lineno) for each in found}


@for_each("inference", [False, True])
def test_a_warning_names_the_line_outside_of_laconic(inference: bool) -> None:
    made, lines = part(), set()

    def act() -> None:
        with torch.inference_mode(inference):
            made.plain(), made.decorated(), lines.add(line())
            with made.block():
                lines.add(line() - 1)

    assert places(act) == {(__file__, each) for each in lines} and len(lines) == 2


def test_a_warning_of_a_hook_names_the_line_of_backward() -> None:
    model, lines = nn.Linear(2, 2), set()
    watch = step_watch.StepWatch("a test", None, model.parameters())

    def act() -> None:
        for _ in range(step_watch.PASSES):
            with torch.no_grad():
                model.weight.add_(0.0)
            model(torch.ones(1, 2)).sum().backward(), lines.add(line())

    assert places(act) == {(__file__, each) for each in lines}
    watch.remove()


def test_no_other_file_counts_frames() -> None:
    for path in SRC.rglob("*.py"):
        if path.relative_to(SRC).as_posix() == "core/warning.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called != "warnings.warn", f"{path}:{node.lineno} warns: use laconic.core.warning.warn"
