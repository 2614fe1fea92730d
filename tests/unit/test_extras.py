"""Without the packages of an extra all else works, and a command that needs one says how to install it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.unit.shared import for_each, refuses
from typer.testing import CliRunner

import laconic
from laconic.core.errors import ExtraError
from laconic.tools.cli.main import app
from laconic.tools.tasks.cifar_files import decode_jpegs

TRAIN = ("plotly", "tensorboard", "sklearn", "PIL")
WITHOUT_ANY = f"""
import sys
from typer.testing import CliRunner

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {TRAIN!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
from laconic.tools.cli.main import app

for command in (
    ["--help"],
    ["methods", "dgc"],
    ["topology", "ring()", "--size", "4"],
    ["plan", "--params", "10k", "--workers", "2", "--link", "1gbit", "--backward", "10ms", "-o", "plan.svg"],
    ["doctor"],
):
    assert CliRunner().invoke(app, command).exit_code == 0, command
"""


@for_each("absent", TRAIN[:3])
def test_train_says_what_to_install_before_it_trains(absent, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, absent, None)
    result = CliRunner().invoke(app, ["train", "digits", "--with", "dgc()", "--steps", "2"])
    assert result.exit_code == 2
    assert absent in result.stderr and "pip install 'laconic[train]'" in result.stderr
    assert result.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_jpeg_files_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ExtraError, match=r"JPEG files needs PIL: pip install 'laconic\[train\]'"):
        decode_jpegs(np.zeros(4, np.uint8), np.array([0, 4]))


@for_each("make", [lambda: laconic.federated.compressed(None), laconic.federated.mod])
def test_federated_says_what_to_install(make: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    refuses(ExtraError, r"needs flwr: pip install 'laconic\[federated\]'", make)


def test_other_commands_do_without(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_ANY], cwd=tmp_path, check=True, timeout=240)
    assert (tmp_path / "plan.svg").exists()
