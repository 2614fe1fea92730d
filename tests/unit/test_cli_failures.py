"""A run that fails says why in one line, and leaves no empty report and no older one changed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.commands import invoke, one_line
from tests.unit.shared import for_each
from typer.testing import Result

from laconic.core.atomic_file import write_text
from laconic.tools.cli import session
from laconic.tools.report.ledger import EVENTS, Ledger
from laconic.tools.tasks.launcher import WorkerFailed, _cause
from laconic.tools.tasks.settings import Event, TrainingSettings

from .test_report_summary import step_event

REASON = "rank 1: this method is made for AMSGrad, got SGD: build the optimiser anew"


def train(folder: Path, *arguments: str) -> Result:
    fixed = ["train", "digits", "--with", "dense()", "--batch", "8", "--out", str(folder), "--name", "run"]
    return invoke(*fixed, *arguments)


def failing(monkeypatch: pytest.MonkeyPatch, failure: WorkerFailed, steps: int) -> None:
    """Workers that do so many steps, and then end with this."""

    def launch(plan: TrainingSettings) -> Iterator[Event]:
        for step in range(1, steps + 1):
            for rank in range(plan.workers):
                yield step_event(plan.spec, plan.seed, rank, step)
        raise failure

    monkeypatch.setattr(session, "launch", launch)


def test_what_a_worker_refuses_is_one_line_and_no_report(tmp_path, monkeypatch):
    failing(monkeypatch, WorkerFailed(REASON, expected=True), steps=0)
    result = train(tmp_path)
    said = f"laconic: dense(), seed 0: {REASON}\n"
    assert (result.exit_code, result.stderr, result.stdout) == (1, said, "")
    assert not (tmp_path / "run" / "report.html").exists()


def test_what_was_measured_before_a_failure_is_reported(tmp_path, monkeypatch):
    failing(monkeypatch, WorkerFailed(REASON, expected=True), steps=3)
    result = train(tmp_path)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert "report.html" in result.stdout
    assert REASON in json.loads((tmp_path / "run" / "summary.json").read_text())["interrupted"]


def test_a_fault_shows_the_workers_traceback_and_where_the_books_are(tmp_path, monkeypatch):
    fault = WorkerFailed("rank 0: KeyError: 'x'", "Traceback (most recent call last):\nKeyError: 'x'\n")
    failing(monkeypatch, fault, steps=1)
    lines = train(tmp_path).stderr.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-2:] == [
        f"all steps before this error are in {tmp_path / 'run' / EVENTS}",
        "laconic: dense(), seed 0: rank 0: KeyError: 'x'",
    ]


def test_a_refused_resume_leaves_the_older_report_as_it_is(tmp_path, monkeypatch):
    failing(monkeypatch, WorkerFailed(REASON, expected=True), steps=3)
    train(tmp_path)
    files = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    result = train(tmp_path, "--resume", "--steps", "17")
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("laconic: --resume:") and result.stderr.count("\n") == 1
    assert files == {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full takes nothing, like a disk without room."""
    failing(monkeypatch, WorkerFailed(REASON, expected=True), steps=3)
    opened = Path.open

    def full(path: Path, *args: object, **kwargs: object) -> object:
        return opened(Path("/dev/full") if path.name == EVENTS else path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    one_line(train(tmp_path), "No space left on device; make room or give another --out")


def test_out_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    for out in (tmp_path / "taken", tmp_path / "taken" / "deeper"):
        one_line(train(out), f"--out: {tmp_path / 'taken'} is a file, and runs need a folder")


RUNS = ("train digits --with dense() --name run", "federate digits --with fedavg() --name run", "demo")


@for_each("out", ["/proc/x", "/proc", "x" * 300])
@for_each("words", RUNS)
def test_a_folder_that_cannot_be_made_is_one_line_before_any_work(words, out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "prepare", None)  # no data is read
    one_line(invoke(*words.split(), "--out", out), f"laconic: --out: cannot make {out}/")
    assert not any(tmp_path.iterdir())


PLAN = "plan --params 1k --workers 2 --link 1gbit --backward 1ms"


@for_each("out", ["/proc/x.svg", "x" * 300 + ".svg"])
@for_each("words", ["topology ring()", "partition digits", PLAN, "probe"])
def test_a_file_that_cannot_be_written_is_one_line_before_any_work(words, out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("laconic.tools.cli.plan.rehearse_all", None)
    monkeypatch.setattr("laconic.tools.cli.probe.run", None)
    one_line(invoke(*words.split(), "--out", out), f"laconic: --out: cannot write {out}")


def test_a_demo_is_refused_a_file_for_its_folder_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "taken").touch()
    monkeypatch.setattr("laconic.tools.cli.demo.lab", None)
    one_line(
        invoke("demo", "--out", tmp_path / "taken"),
        f"--out: {tmp_path / 'taken'} is a file, and runs need a folder",
    )


def test_a_run_in_the_way_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, WorkerFailed(REASON, expected=True), steps=3)
    train(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    monkeypatch.setattr(session, "prepare", None)  # no data is read
    one_line(train(tmp_path), "holds a run already: give another --name, --resume")
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_the_cause_is_the_fault_that_another_rank_reports() -> None:
    heard = {"at": 1.0, "message": "nothing was attached: rank 1 says: no such key", "details": ""}
    fault = {"at": 1.1, "message": "no such key", "details": "Traceback ..."}
    echo = {"at": 1.2, "message": "connection closed by peer", "details": "Traceback ..."}
    assert _cause([heard, echo, fault]) is fault
    assert _cause([heard, echo]) is heard


class Full(Ledger):
    """A ledger whose events go to a full disk."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        super().__init__(folder, config)
        self._events.close()
        self._events = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "Ledger", Full)
    failing(monkeypatch, WorkerFailed("never raised"), steps=2)
    one_line(train(tmp_path), f"laconic: cannot write {tmp_path / 'run' / EVENTS}: No space left on device;")


def test_a_federation_on_a_full_disk_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("laconic.tools.cli.federate.EVENTS", "/dev/full")
    words = "federate digits --with fedavg() --rounds 1 --clients 2 --name run --out"
    result = invoke(*words.split(), tmp_path)
    assert result.exit_code == 2
    assert "laconic: cannot write /dev/full: No space left on device;" in result.stderr


def test_a_failed_replacement_names_the_file_itself(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("folder", "missing/file"):
        with pytest.raises(OSError, match=re.escape(str(tmp_path / name))) as caught:
            write_text(tmp_path / name, "text")
        assert caught.value.filename == str(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
