"""Ctrl-C before anything has begun: one line, exit code 130, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT_S = 120
COMMAND = (sys.executable, "-m", "laconic.cli.main")
LINUX = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc, which is Linux")
SLEEPY = "import time\nfrom pathlib import Path\n\nPath('here').touch()\ntime.sleep(200)\n"


def begin(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def interrupt(command: subprocess.Popen[str]) -> list[str]:
    """Ctrl-C on a terminal reaches the whole group. Returns what was printed, when all who could are gone."""
    os.killpg(command.pid, signal.SIGINT)
    try:
        return command.communicate(timeout=LIMIT_S)[0].splitlines()
    finally:
        if command.poll() is None:
            os.killpg(command.pid, signal.SIGKILL)


def imports_torch(pid: int) -> bool:
    """Whether a process has begun to: its library is there."""
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def wait_for(happened: object, command: subprocess.Popen[str]) -> None:
    end = time.monotonic() + LIMIT_S
    while not happened() and command.poll() is None:  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


@LINUX
@pytest.mark.parametrize("words", [["methods"], ["run", "sleepy.py", "--nproc-per-node", "1"]])
def test_while_torch_is_imported(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    command = begin(tmp_path, *words)
    wait_for(lambda: imports_torch(command.pid), command)
    assert interrupt(command) == ["laconic: interrupted"]
    assert command.returncode == 130


@LINUX
def test_while_the_server_of_workers_begins(tmp_path: Path) -> None:
    command = begin(tmp_path, "train", "digits", "--with", "dense()", "--steps", "5000")
    wait_for(lambda: any(map(imports_torch, children(command.pid))), command)
    (line,) = interrupt(command)
    assert line == "laconic: interrupted before it began: nothing was measured"
    assert command.returncode == 130


@LINUX
def test_while_ranks_of_a_script_begin(tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    command = begin(tmp_path, "run", "sleepy.py", "--nproc-per-node", "2")
    wait_for(lambda: sum(map(imports_torch, children(command.pid))) == 2, command)
    assert interrupt(command) == ["laconic: interrupted"]
    assert command.returncode == 130


@LINUX
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_the_launcher_does_not_know_yet_ends_too(tmp_path: Path, ranks: int) -> None:
    """torch learns of its processes when all of them are there."""
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    command = begin(tmp_path, "run", "sleepy.py", "--nproc-per-node", "2")
    while len(children(command.pid)) < ranks and command.poll() is None:
        pass  # as soon as it can be seen
    assert interrupt(command) == ["laconic: interrupted"]
    assert command.returncode == 130


@LINUX
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    command = begin(tmp_path, "run", "sleepy.py", "--nproc-per-node", "2")
    wait_for((tmp_path / "here").exists, command)
    os.kill(command.pid, signal.SIGKILL)
    command.communicate(timeout=LIMIT_S)  # a rank that lived would hold the pipe


INSIDE_EXEC = """
from laconic.cli.main import app

@app.command()
def stop() -> None:
    exec("raise KeyboardInterrupt")

app(["stop"])
"""


def test_inside_exec(tmp_path: Path) -> None:
    """As where dataclasses are made: Python remembers it there, and ends by the signal, not by a code."""
    (tmp_path / "stops.py").write_text(INSIDE_EXEC)
    ended = subprocess.run(
        [sys.executable, "-m", "stops"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.stderr.splitlines() == ["laconic: interrupted"]
    assert ended.returncode == 130


def test_in_a_users_script_signals_stay_as_they_are(tmp_path: Path) -> None:
    code = "import signal, laconic; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S, cwd=tmp_path)
