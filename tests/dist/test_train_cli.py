"""`laconic train` on real processes: a run, Ctrl-C, a crash and a kill."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from laconic.tools.report.ledger import EVENTS, read_events
from tests.dist.commands import (
    descendants,
    finish,
    group_is_gone,
    interrupt,
    mentions,
    soon,
    train,
    trained,
    wait_for,
)

THIRD_PARTY = """
from laconic.reducers.sum import Sum


class Faulty(Sum):
    def bind(self, layout, comm):
        if comm.rank == 1:
            raise ZeroDivisionError("a fault of rank 1")
        return super().bind(layout, comm)
"""


LINUX = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds workers in /proc, as on Linux")


FOREVER = ("--steps", 100000, "--eval-every", 0, "--with", "dense()", "--name", "run")


def has_trained(folder: Path) -> bool:
    """Whether a run has done some steps."""
    return max((event.get("step", 0) for event in read_events(folder / "run")), default=0) > 5


def training(folder: Path) -> subprocess.Popen[str]:
    """A run without end that has done some steps."""
    process = train(folder, *FOREVER)
    wait_for(lambda: has_trained(folder), process)
    return process


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the workers, in the order of their ranks."""
    found = descendants(process.pid)
    return sorted(pid for pid in found if not descendants(pid) and mentions("cmdline", pid, "forkserver"))


def test_a_run_writes_all_that_it_promises(tmp_path: Path) -> None:
    arguments = ["--steps", "6", "--with", "dgc(density=0.01)", "--against", "dense()", "--name", "run"]
    arguments += ["--with", "lsgd()"]  # a strategy, which asks each rank for its machine
    specs = ("dense()", "dgc(density=0.01)", "lsgd()")
    code, output, complaints = trained(tmp_path, *arguments)
    folder = tmp_path / "run"
    assert code == 0, complaints
    assert str(folder / "report.html") in output.replace("\n", "")
    for name in ("report.html", "loss.svg", "summary.json", "config.json", EVENTS):
        assert (folder / name).stat().st_size > 0
    assert len(list((folder / "tensorboard").rglob("events.out.*"))) == 3

    steps = [event for event in read_events(folder) if event["kind"] == "step"]
    expected = {(m, r, s) for m in specs for r in range(2) for s in range(1, 7)}
    assert {(event["method"], event["rank"], event["step"]) for event in steps} == expected
    assert len(steps) == len(expected)
    dense, dgc, lsgd = json.loads((folder / "summary.json").read_text())["rows"]
    parameters = 283_786
    assert dense["payload_mb"] == pytest.approx(4 * parameters / 1e6)
    assert dgc["smaller"] >= 50
    assert dgc["consensus"] == 0 < lsgd["consensus"]
    assert "dgc(density=0.01)" in output and "step 6/6" in output


@pytest.mark.nightly
def test_on_a_terminal_it_trains_too(tmp_path: Path) -> None:
    """There a table is redrawn, where a pipe gets lines."""
    ours, theirs = os.openpty()
    process = train(tmp_path, "--steps", "3", "--with", "cgx()", "--name", "run", stdout=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux: the end
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    code, _, complaints = finish(process)
    assert code == 0, (complaints, shown.decode())
    assert b"report.html" in re.sub(rb"\r?\n", b"", shown)  # a long path breaks at the edge


def test_ctrl_c_ends_all_and_keeps_what_was_measured(tmp_path: Path) -> None:
    process = training(tmp_path)
    code, output, complaints = interrupt(process)
    assert code == 130, complaints
    assert "Interrupted" in output and not complaints
    go_on, kept = output.splitlines()[-2:]
    assert go_on.startswith("to resume: laconic train digits --workers 2 ")
    assert go_on.endswith("--with 'dense()' --name run --resume")
    assert kept.endswith("resumes from its start, as there are no checkpoints")
    assert group_is_gone(process.pid), "a worker is left"
    report = (tmp_path / "run" / "report.html").read_text()
    assert "Interrupted: this report covers the measurements until then." in report
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rows"][0]["steps"] > 5


def test_a_crash_shows_that_workers_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = multiprocessing.active_children()
    package = tmp_path / "faulty-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[laconic.methods]\nfaulty = faulty:Faulty\n")
    (tmp_path / "faulty.py").write_text(THIRD_PARTY)
    monkeypatch.syspath_prepend(tmp_path)  # workers have it too
    code, _, complaints = trained(tmp_path, "--steps", 5, "--with", "faulty()", "--name", "run")
    assert code == 1
    assert "Traceback" in complaints and "ZeroDivisionError: a fault of rank 1" in complaints
    *_, books, reason = complaints.strip().splitlines()
    assert reason == "laconic: faulty(), seed 0: rank 1: ZeroDivisionError: a fault of rank 1"
    assert books == f"all steps before this error are in {tmp_path / 'run' / EVENTS}"
    assert {*multiprocessing.active_children()} <= {*before}, "a worker is left"


def test_a_training_that_diverges_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    code, output, complaints = trained(
        tmp_path, "--steps", "40", "--lr", "1e20", "--with", "dgc(density=0.01)", "--name", "run"
    )
    assert code == 1
    (line,) = [line for line in complaints.splitlines() if "ProcessGroup" not in line]
    assert line.startswith("laconic: dgc(density=0.01), seed 0: rank ") and line.endswith(
        "; use a lower --lr"
    )
    assert "training has diverged" in line and "at a learning rate of 1e+20" in line
    assert "report.html" in output, "what was measured until then is there"


def test_a_killed_worker_is_named(tmp_path: Path) -> None:
    before = multiprocessing.active_children()

    def kill_rank_1() -> None:
        wait_for(lambda: has_trained(tmp_path))
        workers = (each for each in multiprocessing.active_children() if each not in before)
        max(workers, key=lambda each: each.pid or 0).kill()

    with ThreadPoolExecutor(1) as threads:
        killed = threads.submit(kill_rank_1)
        code, output, complaints = trained(tmp_path, *FOREVER)
        killed.result()
    assert code == 1
    assert "laconic: dense(), seed 0: rank 1: the worker was killed by SIGKILL" in complaints
    assert str(tmp_path / "run" / EVENTS) in complaints
    assert "report.html" in output
    assert {*multiprocessing.active_children()} <= {*before}, "a worker is left"


@pytest.mark.nightly
@LINUX
def test_workers_end_with_a_killed_launcher_whatever_they_wait_for(tmp_path: Path) -> None:
    process = training(tmp_path)
    workers = workers_of(process)
    os.kill(workers[-1], signal.SIGSTOP)  # the other one waits for it, for TIMEOUT
    os.kill(process.pid, signal.SIGKILL)
    try:
        assert soon(lambda: not Path(f"/proc/{workers[0]}").exists()), (
            "it waits for a worker that stands still"
        )
    finally:
        os.kill(workers[-1], signal.SIGKILL)
        finish(process)
