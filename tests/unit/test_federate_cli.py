"""`laconic federate`: what it trains, writes and refuses."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.unit.commands import invoke
from tests.unit.shared import for_each

from laconic.tools.cli.files import default_name
from laconic.tools.report.ledger import CONFIG, EVENTS
from laconic.tools.report.summary import SUMMARY

SMALL = ["--clients", "6", "--per-round", "3", "--rounds", "4", "--local-steps", "2", "--eval-every", "2"]


def run(*args: object) -> tuple[int, str]:
    result = invoke("federate", "digits", *args)
    return result.exit_code, result.output


def test_fewer_clients_than_the_default_all_take_part_and_nothing_is_smaller_than_itself(
    tmp_path: Path,
) -> None:
    """`--clients 5` alone was refused: "--per-round must be a whole number in 2..5, got 10"."""
    few = ("--clients", 5, "--rounds", 1)
    code, said = run(*few, "--with", "stc(density=0.05)", "--out", tmp_path, "--name", "a")
    assert code == 0, said
    assert json.loads((tmp_path / "a" / SUMMARY).read_text())["rows"][0]["smaller"] is None
    assert "1.00 ×" not in said  # noqa: RUF001
    event = json.loads((tmp_path / "a" / EVENTS).read_text().splitlines()[0])
    assert event["chosen"] == [0, 1, 2, 3, 4]


def test_a_scheme_may_transform_the_model_that_clients_train(tmp_path: Path) -> None:
    code, said = run(
        *SMALL, "--with", "zerofl(sparsity=0.8)", "--against", "fedavg()",
        "--out", str(tmp_path), "--name", "a",
    )  # fmt: skip
    assert code == 0, said
    rows = json.loads((tmp_path / "a" / SUMMARY).read_text())["rows"]
    assert [row["spec"] for row in rows] == ["fedavg()", "zerofl(sparsity=0.8)"]
    assert rows[1]["smaller"] > 1 and rows[1]["failed"] == 0


def test_a_run_compares_schemes_and_writes_a_page(tmp_path: Path) -> None:
    code, said = run(
        *SMALL, "--with", "stc(density=0.05, down=0.05)", "--against", "fedavg()", "--seeds", "2",
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
    code, said = run(*SMALL, "--with", "fedavg()", "--out", str(tmp_path), "--name", "a")
    assert code == 2 and "holds a run already: give another --name, or --overwrite" in said
    assert rows == json.loads((tmp_path / "a" / SUMMARY).read_text())["rows"]


@for_each(
    "args, words",
    [
        ([], "no scheme given"),
        (["--with", "fedavg()", "--engine", "ray"], "--engine"),
        (["--with", "powersgd(rank=2)"], "needs all ranks at once"),
        (["--with", "diloco()"], "compress takes a method"),
        (["--with", "fedavg()", "--by", "ring()"], "is not a partition"),
        (["--with", "fedavg()", "--by", "iid()", "--classes-per-client", "11"], "classes"),
        (["--with", "fedavg()", "--per-round", "7"], "--per-round must be a whole number in 2..6, got 7"),
        (["--with", "fedavg()", "--per-round", "1"], "--per-round must be a whole number in 2..6, got 1"),
        (["--with", "fedavg()", "--rounds", "0"], "--rounds must be a whole number"),
        (["--with", "fedavg()", "--seeds", "0"], "--seeds must be 1 or more"),
        (["--with", "fedavg()", "--name", ""], "--name must be the name of a folder"),
        (["--with", "fedavg()", "--name", "../x"], "--name must be the name of a folder"),
        (["--with", "fedavg()", "--lr", "0"], "--lr must be a finite number above 0"),
        (["--with", "updates(sampling=ring())"], "sampling must be a sampling such as"),
        (["--with", "fedavg()", "--by", "dirichlet(0.5)", "--classes-per-client", "2"], "remove --by"),
        (["--with", "fedavg()", "--by", "by_speaker()"], "digits has no speakers"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_starts(args: list[str], words: str, tmp_path: Path) -> None:
    small = [*SMALL] if "--rounds" not in args and "--per-round" not in args else SMALL[:2] + SMALL[6:]
    code, said = run(*small, *args, "--out", str(tmp_path))
    assert code == 2 and words in " ".join(said.split()), said
    assert not list(tmp_path.iterdir())


def test_two_spellings_are_one_scheme_and_a_sampling_of_its_own_takes_the_place_of_per_round(tmp_path):
    spec = "updates(sampling=falling(1.0, rate=0.5))"
    args = ["--with", "fedavg", "--with", " fedavg( )", "--with", spec, "--against", "fedavg()"]
    code, said = run(*SMALL, *args, "--out", tmp_path, "--name", "a")
    assert code == 0, said
    config = json.loads((tmp_path / "a" / CONFIG).read_text())
    rows = json.loads((tmp_path / "a" / SUMMARY).read_text())["rows"]
    assert config["schemes"] == [row["spec"] for row in rows] and config["against"] == ["fedavg()"]
    assert config["schemes"].count("fedavg()") == 1 and len(rows) == 2
    words = "6 of 6 in the first round and 2 in the last, not --per-round 3"
    assert " ".join(said.split()).count(words) == 1, said
    events = [json.loads(line) for line in (tmp_path / "a" / EVENTS).read_text().splitlines()]
    assert [len(each["chosen"]) for each in events if each["scheme"] == "fedavg()"] == [3, 3, 3, 3]
    assert [len(each["chosen"]) for each in events if each["scheme"] != "fedavg()"] == [6, 4, 2, 2]


def test_runs_of_one_second_have_two_names() -> None:
    first = default_name("digits")
    time.sleep(0.002)
    assert default_name("digits") != first


@pytest.mark.skipif(find_spec("flwr") is not None, reason="Flower is installed here")
def test_flower_s_engine_says_how_to_install_it(tmp_path: Path) -> None:
    code, said = run(*SMALL, "--with", "fedavg()", "--engine", "flower", "--out", str(tmp_path))
    assert code == 2 and "pip install 'laconic[federated]'" in " ".join(said.split())
    assert not list(tmp_path.iterdir()), "a folder was made for a run that cannot begin"
