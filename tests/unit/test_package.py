"""What pyproject.toml says of the package is what the Makefile runs."""

from __future__ import annotations

import inspect
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import laconic
from laconic.core import framing
from laconic.core.spec import find
from laconic.tools.cli.main import app
from laconic.tools.cli.presets import PRESETS

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
    assert f"torch {major}.{minor} to {top}.{last}" in (ROOT / "README.md").read_text()
    assert "make test-torch" in (ROOT / ".ci" / "run").read_text()
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", PROJECT, re.MULTILINE | re.DOTALL)
    assert re.findall(r'"(\w+)', listed) == ["torch", "numpy", "typer", "rich"], "hard dependencies are few"
    (written,) = re.findall(r'^version = "(.*)"$', PROJECT, re.MULTILINE)
    assert laconic.__version__ == version("laconic") == written
    said = CliRunner().invoke(app, ["--version"])
    assert (said.exit_code, said.output) == (0, f"laconic {written}\n")


def test_help_of_compress_has_an_example_whose_spec_is_one() -> None:
    (line,) = (line for line in (laconic.compress.__doc__ or "").splitlines() if "laconic.compress(" in line)
    (spec,) = re.findall(r'"(.*)"', line)
    assert laconic.parse(spec) is not None


def test_arguments_of_the_presets_are_all_explained() -> None:
    for preset in PRESETS:
        make = find(preset.spec.partition("(")[0])
        words = f"{sys.modules[make.__module__].__doc__} {make.__doc__}"
        missing = [
            name for name in inspect.signature(make).parameters if not re.search(rf"\b{name}\b", words)
        ]
        assert not missing, (preset.spec, missing)


def test_a_machine_of_another_byte_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    text = Path(framing.__file__).read_text()
    with pytest.raises(ImportError, match="wires are little-endian, and this machine is big-endian"):
        exec(compile(text, framing.__file__, "exec"), {"__name__": "framing"})
