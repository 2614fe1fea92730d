"""The command `laconic train digits` as tests start it, wait for it and read what it wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from laconic.report.ledger import read_events

LIMIT_S = 400


def start(folder: Path, *arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "laconic.cli.main",
        "train",
        "digits",
        "--workers",
        "2",
    ]
    return subprocess.Popen(
        [*command, "--batch", "8", "--out", str(folder), *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # a group of its own, as a terminal gives it
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        output, complaints = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()  # closes its files, which the next test would be blamed for
    return process.returncode, output, complaints


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def losses(folder: Path, seed: int) -> dict[tuple[int, int], float]:
    steps = [event for event in read_events(folder) if event["kind"] == "step" and event["seed"] == seed]
    return {(event["step"], event["rank"]): event["loss"] for event in steps}


def steps_done(folder: Path, seed: int = 0) -> int:
    return max((event["step"] for event in read_events(folder) if event["seed"] == seed), default=0)


def group_is_gone(group: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
