"""`laconic demo` on real emulated links: its table, and that nothing is left of it, also after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laconic.lab import missing
from laconic.report.ledger import EVENTS

LIMIT_S = 240
pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no lab here: {missing()}")


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "laconic.cli.main", "demo", "--out", str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )


def left_of(folder: Path) -> list[str]:
    """Command lines of the processes that have this folder in theirs, once they had time to end."""
    deadline = time.monotonic() + 20
    while True:
        found = []
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = each.read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has just ended
                continue
            if str(folder) in words:
                found.append(words)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def test_the_demo_trains_over_emulated_links_and_leaves_none(tmp_path: Path) -> None:
    demo = start(tmp_path, "--steps", "2")
    try:
        said, complaints = demo.communicate(timeout=LIMIT_S)
    finally:
        demo.kill()
    assert demo.returncode == 0, complaints
    assert "an emulated link of 100 Mbit/s" in said and "s to 96 %" in said
    rows = {row["spec"]: row for row in json.loads((tmp_path / "demo" / "summary.json").read_text())["rows"]}
    assert list(rows) == ["dense()", "fp16()", "auto()", "dgc(density=0.01)"]
    sent_s = rows["dense()"]["wire_mb"] * 8 / 100
    assert rows["dense()"]["step_s"]["mean"] > 0.9 * sent_s > 1, "as slow as 100 Mbit/s are"
    assert rows["dense()"]["counted_mb"] > rows["dgc(density=0.01)"]["counted_mb"] > 0
    assert not left_of(tmp_path)


def test_ctrl_c_ends_the_demo_cleanly(tmp_path: Path) -> None:
    demo = start(tmp_path)
    try:
        deadline = time.monotonic() + LIMIT_S
        events = tmp_path / "demo" / EVENTS
        while not (events.exists() and events.stat().st_size):
            assert demo.poll() is None and time.monotonic() < deadline, demo.communicate()
            time.sleep(0.05)
        os.killpg(demo.pid, signal.SIGINT)
        said, complaints = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 130, complaints
    assert "Interrupted" in said and "Traceback" not in complaints
    assert not left_of(tmp_path)
