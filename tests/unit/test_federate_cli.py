"""`laconic federate`: what it trains, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laconic.cli.main import app
from laconic.report.ledger import CONFIG, EVENTS
from laconic.report.summary import SUMMARY

SMALL = ["--clients", "6", "--per-round", "3", "--rounds", "4", "--local-steps", "2", "--eval-every", "2"]


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["federate", *args])
    return result.exit_code, result.output


def test_a_run_compares_schemes_and_writes_a_page(tmp_path: Path) -> None:
    code, said = run(
        "digits", *SMALL, "--with", "stc(density=0.05, down=0.05)", "--against", "fedavg()", "--seeds", "2",
        "--classes-per-client", "2", "--out", str(tmp_path), "--name", "a",
    )  # fmt: skip
    assert code == 0, said
    rows = json.loads((tmp_path / "a" / SUMMARY).read_text())["rows"]
    assert [row["spec"] for row in rows] == ["fedavg()", "stc(density=0.05, down=0.05)"]
    assert rows[0]["smaller"] == 1 < 8 < rows[1]["smaller"] and rows[1]["failed"] == 0
    events = [json.loads(line) for line in (tmp_path / "a" / EVENTS).read_text().splitlines()]
    assert len(events) == 2 * 2 * 4
    chosen = {(event["seed"], event["round"], tuple(event["chosen"])) for event in events}
    assert len(chosen) == 2 * 4, "both schemes meet the same clients"
    assert rows[1]["up_mb"] == pytest.approx(
        sum(event["up"] for event in events if event["scheme"].startswith("stc")) / 2 / 1e6
    )
    assert "plotly" in (tmp_path / "a" / "report.html").read_text()
    code, said = run("digits", *SMALL, "--with", "fedavg()", "--out", str(tmp_path), "--name", "a")
    assert code == 0 and (tmp_path / "a.old" / CONFIG).exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "no scheme given"),
        (["--with", "powersgd(rank=2)"], "needs all ranks at once"),
        (["--with", "diloco()"], "compress takes a method"),
        (["--with", "fedavg()", "--by", "ring()"], "is not a partition"),
        (["--with", "fedavg()", "--by", "iid()", "--classes-per-client", "11"], "classes"),
        (["--with", "fedavg()", "--per-round", "7"], "--per-round must be a whole number in 2..6, got 7"),
        (["--with", "fedavg()", "--per-round", "1"], "--per-round must be a whole number in 2..6, got 1"),
        (["--with", "fedavg()", "--rounds", "0"], "--rounds must be a whole number"),
        (["--with", "fedavg()", "--seeds", "0"], "--seeds must be 1 or more"),
        (["--with", "fedavg()", "--lr", "0"], "--lr must be a finite number above 0"),
        (["--with", "updates(sampling=ring())"], "sampling must be one such as"),
        (["--with", "fedavg()", "--by", "dirichlet(0.5)", "--classes-per-client", "2"], "leave --by"),
        (["--with", "fedavg()", "--by", "by_speaker()"], "digits has no speakers"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_starts(args: list[str], words: str, tmp_path: Path) -> None:
    small = [*SMALL] if "--rounds" not in args and "--per-round" not in args else SMALL[:2] + SMALL[6:]
    code, said = run("digits", *small, *args, "--out", str(tmp_path))
    assert code == 2 and words in " ".join(said.split()), said
    assert not list(tmp_path.iterdir())
