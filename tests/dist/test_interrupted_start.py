"""Ctrl-C before anything has begun: one line, exit code 130, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dist.commands import LACONIC, children, finish, interrupt, mentions, run, start, wait_for

LINUX = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc, which is Linux")
SLEEPY = """
import os, signal, time
from pathlib import Path

signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # a busy machine may have come as far as here
Path("here").touch()
time.sleep(200)
"""
RUN = ("run", "sleepy.py", "--nproc-per-node")


def begin(folder: Path, *words: object) -> subprocess.Popen[str]:
    (folder / "sleepy.py").write_text(SLEEPY)
    return start(*LACONIC, *words, cwd=folder, stderr=subprocess.STDOUT)


def imports_torch(pid: int) -> bool:
    """Whether a process has begun to: its library is there."""
    return mentions("maps", pid, "libtorch")


def check(command: subprocess.Popen[str], said: str = "laconic: interrupted") -> None:
    """Ctrl-C leaves one line, when all who could print are gone."""
    ended = interrupt(command)
    assert (ended.code, ended.output.splitlines()) == (130, [said])


@LINUX
@pytest.mark.parametrize("words", [["methods"], [*RUN, 1]])
def test_while_torch_is_imported(tmp_path: Path, words: list[object]) -> None:
    for _ in range(5):
        command = begin(tmp_path, *words)
        while not imports_torch(command.pid) and command.poll() is None:
            time.sleep(0.02)
        ended = interrupt(command) if command.poll() is None else finish(command)
        if ended.code != 0:  # else it was done before the signal, on a busy machine
            break
    assert (ended.code, ended.output.splitlines()) == (130, ["laconic: interrupted"])


@pytest.mark.nightly
@LINUX
def test_while_the_server_of_workers_begins(tmp_path: Path) -> None:
    command = begin(tmp_path, "train", "digits", "--with", "dense()", "--steps", "5000")
    wait_for(lambda: any(map(imports_torch, children(command.pid))), command)
    check(command, "laconic: interrupted before it began: nothing was measured")


@LINUX
def test_while_ranks_of_a_script_begin(tmp_path: Path) -> None:
    command = begin(tmp_path, *RUN, 2)
    wait_for(lambda: sum(map(imports_torch, children(command.pid))) == 2, command)
    check(command)


@LINUX
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_rank_that_the_launcher_does_not_know_yet_ends_too(tmp_path: Path, ranks: int) -> None:
    """torch learns of its processes when all of them are there."""
    command = begin(tmp_path, *RUN, 2)
    while len(children(command.pid)) < ranks and command.poll() is None:
        pass  # as soon as it can be seen
    check(command)


@LINUX
def test_while_python_begins_in_a_rank(tmp_path: Path) -> None:
    """Its own imports would print a traceback."""
    for delay_ms in (4, 8, 12):
        command = begin(tmp_path, *RUN, 1)
        while not children(command.pid) and command.poll() is None:
            pass  # as soon as it can be seen
        time.sleep(delay_ms / 1000)
        check(command)


@pytest.mark.nightly
@LINUX
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    command = begin(tmp_path, *RUN, 2)
    wait_for((tmp_path / "here").exists, command)
    os.kill(command.pid, signal.SIGKILL)
    finish(command)  # a rank that lived would hold the pipe


INSIDE_EXEC = """
from laconic.tools.cli.main import app

@app.command()
def stop() -> None:
    exec("raise KeyboardInterrupt")

app(["stop"])
"""


def test_inside_exec(tmp_path: Path) -> None:
    """As where dataclasses are made: Python remembers it there, and ends by the signal, not by a code."""
    (tmp_path / "stops.py").write_text(INSIDE_EXEC)
    ended = run(sys.executable, "-m", "stops", cwd=tmp_path)
    assert (ended.code, ended.errors.splitlines()) == (130, ["laconic: interrupted"])


def test_in_a_users_script_signals_stay_as_they_are(tmp_path: Path) -> None:
    code = "import signal, laconic; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    assert run(sys.executable, "-c", code, cwd=tmp_path).code == 0
