"""What a run says while it runs."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.shared import for_each

from laconic.tools.cli.interrupts import SIGNALS, Interrupts
from laconic.tools.cli.progress import Progress
from laconic.tools.cli.session import sent_before
from laconic.tools.cli.settings import Options, Settings
from laconic.tools.report.ledger import read_events

from .test_report_summary import write_run


def test_the_last_line_of_a_method_has_nothing_left(tmp_path: Path) -> None:
    settings = Settings.of(
        Options(
            task="digits", methods=("dense()",), workers=1, seeds=2, steps=40, eval_every=20, out=tmp_path,
            name="x",
        )
    )  # fmt: skip
    told = io.StringIO()
    with Progress(Console(file=told, width=200), settings) as progress:
        for seed in range(2):
            progress.begin("dense()", seed)
            for step in range(1, 41):
                about = {"method": "dense()", "rank": 0, "step": step}
                progress.show({**about, "kind": "step", "loss": 1.0, "step_s": 1.0, "network_sent": 8})
                if step % 20 == 0:
                    progress.show({**about, "kind": "eval", "right": 1, "answers": 2, "loss_sum": 1.0})
            progress.end("dense()", seed)
    left = [line.rpartition("left ")[2].strip() for line in told.getvalue().splitlines()]
    assert left == ["1:00", "40 s", "20 s", "0 s"]


def test_time_left_counts_tests_and_sent_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1 s and tests of 10 s: after the second of four tests, 20 steps and 2 tests are left."""
    settings = Settings.of(
        Options(
            task="digits", methods=("dense()",), workers=1, seeds=1, steps=40, eval_every=10, out=tmp_path,
            name="x",
        )
    )  # fmt: skip
    told, now = io.StringIO(), [0.0]
    monkeypatch.setattr("laconic.tools.cli.progress.time.monotonic", lambda: now[0])
    with Progress(Console(file=told, width=200), settings) as progress:
        progress.begin("dense()", 0, sent_mb=5.0)
        for step in range(1, 41):
            about = {"method": "dense()", "rank": 0, "step": step}
            now[0] += 1
            progress.show({**about, "kind": "step", "loss": 1.0, "step_s": 1.0, "network_sent": 1e6})
            if step % 10 == 0:
                now[0] += 10
                progress.show({**about, "kind": "eval", "right": 1, "answers": 2, "loss_sum": 1.0})
    lines = told.getvalue().splitlines()
    assert [line.rpartition("left ")[2].strip() for line in lines] == ["1:00", "40 s", "20 s", "0 s"]
    assert "sent 15.00 MB" in lines[0] and "sent 45.00 MB" in lines[-1]


def test_what_a_resumed_training_has_sent_is_read_from_its_ledger(tmp_path: Path) -> None:
    write_run(tmp_path)
    (sent,) = {
        sum(event["network_sent"] for event in read_events(tmp_path) if event["kind"] == "step"
            and (event["method"], event["seed"], event["rank"]) == ("dense()", 1, 0))
    }  # fmt: skip
    assert sent_before(tmp_path, "dense()", 1) == pytest.approx(sent / 1e6) and sent > 0
    assert sent_before(tmp_path, "nothing()", 1) == 0


@for_each("sparsity", [None, "rigl(density=0.2)", "swat(sparsity=0.9)"])
def test_on_a_terminal_a_table_is_drawn(tmp_path: Path, sparsity: str | None) -> None:
    settings = Settings.of(
        Options(
            task="digits", methods=("dense()",), workers=1, seeds=1, steps=2, eval_every=1, out=tmp_path,
            name="x", sparsity=sparsity,
        )
    )  # fmt: skip
    told = io.StringIO()
    with Progress(Console(file=told, width=200, force_terminal=True), settings) as progress:
        progress.begin("dense()", 0)
        about = {"method": "dense()", "rank": 0, "step": 1}
        progress.show({**about, "kind": "step", "loss": 1.0, "step_s": 1.0, "network_sent": 8})
        progress.end("dense()", 0)
    drawn = told.getvalue()
    assert "method" in drawn and "step time" in drawn
    assert ("density" in drawn) == (sparsity is not None and "rigl" in sparsity)


@for_each("number", SIGNALS)
def test_a_signal_waits_for_what_is_held_and_then_interrupts(number: signal.Signals) -> None:
    before, written = signal.getsignal(number), []
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        for event in range(5):
            with interrupts.held():
                if event == 2:
                    signal.raise_signal(number)
                written.append(event)
    assert written == [0, 1, 2]
    assert signal.getsignal(number) is before


@for_each("number", SIGNALS)
def test_elsewhere_it_interrupts_at_once(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(number)


def test_what_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_in_what_is_held_is_not_lost() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(ValueError, match="a fault"), interrupts.held():
            raise ValueError("a fault")
        with interrupts.held():  # and the next is held as before
            pass
