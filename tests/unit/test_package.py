"""What pyproject.toml says of the package is what the Makefile runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def end(name: str) -> tuple[int, int]:
    """Major and minor version of torch at an end of the range that is run."""
    ((major, minor),) = re.findall(rf"^{name} *:= (\d+)\.(\d+)\.\d+$", MAKEFILE, re.MULTILINE)
    return int(major), int(minor)


def test_the_range_of_torch_is_the_one_that_is_run() -> None:
    (major, minor), (top, last) = end("LOWEST"), end("HIGHEST")
    assert f'"torch>={major}.{minor},<{top}.{last + 1}"' in PROJECT
    readme = (ROOT / "README.md").read_text()
    assert f"torch {major}.{minor} to {top}.{last}" in readme
    assert "make test-torch" in (ROOT / ".ci" / "run").read_text()


def test_hard_dependencies_are_few() -> None:
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", PROJECT, re.MULTILINE | re.DOTALL)
    assert re.findall(r'"(\w+)', listed) == ["torch", "numpy", "typer", "rich"]
