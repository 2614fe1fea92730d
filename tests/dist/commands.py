"""Commands that tests start: each with a deadline, and none of their processes outlives the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from typer.testing import CliRunner

from laconic.tools.cli.main import app

ROOT = Path(__file__).parents[2]
LACONIC = (sys.executable, "-m", "laconic.tools.cli")
LIMIT_S = 400


class Ended(NamedTuple):
    """Exit code, output and errors of a command."""

    code: int
    output: str
    errors: str


def start(*words: Any, **options: Any) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, as a terminal gives it."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **options.pop("env", {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen([*map(str, words)], env=env, **(pipes | options))


def finish(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> Ended:
    """Wait for a command to end, and end what is left of its group."""
    try:
        output, errors = process.communicate(timeout=limit_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()  # closes its files, which the next test would be blamed for
    return Ended(process.returncode, output, errors)


def run(*words: Any, **options: Any) -> Ended:
    """Run a command from its start to its end."""
    return finish(start(*words, **options))


def laconic(*words: Any, **options: Any) -> Ended:
    """Run the command `laconic` from its start to its end."""
    return run(*LACONIC, *words, **options)


def inside(*words: Any) -> Ended:
    """Run the command `laconic` in this process, which has imported torch, and fork its workers."""
    done = CliRunner().invoke(app, [*map(str, words)])
    return Ended(done.exit_code, done.stdout, done.stderr)


DIGITS = ("train", "digits", "--workers", "2", "--batch", "8", "--out")  # the smallest of the tasks


def train(folder: Path, *words: Any, **options: Any) -> subprocess.Popen[str]:
    """Start `laconic train digits` on two workers."""
    return start(*LACONIC, *DIGITS, folder, *words, **options)


def trained(folder: Path, *words: Any) -> Ended:
    """Run `laconic train digits` on two workers from its start to its end, in this process."""
    return inside(*DIGITS, folder, *words)


def interrupt(process: subprocess.Popen[str]) -> Ended:
    """Press Ctrl-C: a terminal sends SIGINT to the whole group."""
    os.killpg(process.pid, signal.SIGINT)
    return finish(process)


def wait_for(condition: Callable[[], object], *processes: subprocess.Popen[str]) -> None:
    """Wait until a condition holds, while these processes live."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def soon(condition: Callable[[], object], limit_s: float = 30.0) -> bool:
    """Whether a condition holds within the limit."""
    deadline = time.monotonic() + limit_s
    while not (holds := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds


def group_is_gone(group: int) -> bool:
    """Whether all processes of a group end soon."""

    def gone() -> bool:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        return False

    return soon(gone)


def children(pid: int) -> list[int]:
    """Processes that a process has started and that live, by their ids."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def mentions(file: str, pid: int, text: str) -> bool:
    """Whether a file of a process in /proc has this text."""
    try:
        return text.encode() in Path(f"/proc/{pid}/{file}").read_bytes()
    except OSError:
        return False
