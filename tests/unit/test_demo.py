"""`laconic demo` where no links can be emulated."""

from __future__ import annotations

from typing import NoReturn

from typer.testing import CliRunner

from laconic.tools.cli import demo
from laconic.tools.cli.main import app


class Replaced(Exception):
    """In place of this process's end."""


def test_without_rights_it_runs_on_loopback_and_says_that_no_speed_shows(monkeypatch):
    ran = []

    def execv(path: str, command: list[str]) -> NoReturn:
        ran.append(command)
        raise Replaced

    monkeypatch.setattr(demo.os, "execv", execv)
    monkeypatch.setattr(demo, "missing", lambda: "it has no ip: install iproute2")
    monkeypatch.setattr(demo, "lab", None)
    said = CliRunner().invoke(app, ["demo", "--steps", "7"])
    assert isinstance(said.exception, Replaced)
    words = " ".join(said.output.split())
    assert (
        "No emulated links (it has no ip: install iproute2)" in words and "speed cannot be compared" in words
    )
    (command,) = ran
    assert command[3:5] == ["train", "digits"] and command[command.index("--steps") + 1] == "7"
    assert "--overwrite" in command, "make demo runs twice in a row"
