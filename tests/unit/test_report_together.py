"""What a report says of ranks that have parameters of their own; and nothing where events do not tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from laconic.tools.report import Ledger, publish
from laconic.tools.report.curves import consensus_by_step
from laconic.tools.report.notes import Notes, read_notes
from laconic.tools.report.series import read_run
from laconic.tools.report.together import together

from .test_report_summary import CONFIG, step_event, test_event, write_run

GOSSIP, LOCAL = "sgp(linear())", "local_sgd(every=2)"
APART = {GOSSIP: (0.02, 0.01), LOCAL: (3e-8, 0.04), "dense()": (0.0, 0.0)}


def notes(method: str, rank: int, step: int) -> dict[str, Any]:
    if method == GOSSIP:
        return {"weight": 1 - 0.25 * rank, "staleness": step % 3, "peers": [1 - rank], "more": None}
    return {"rounds": step // 2} if method == LOCAL else {}


def write(folder: Path, *methods: str, seeds: int = 1) -> Path:
    config = CONFIG | {"methods": list(methods), "seeds": seeds}
    with Ledger(folder, config) as ledger:
        for method in methods:
            for seed in range(seeds):
                for step in range(1, 5):
                    for rank in range(2):
                        told = notes(method, rank, step)
                        event = step_event(method, seed, rank, step) | ({"notes": told} if told else {})
                        if method == LOCAL and step % 2:
                            event |= {"payload_sent": 0, "network_sent": 0}
                        ledger.write(event)
                        if step % 2 == 0:
                            tested = test_event(method, seed, rank, step)
                            ledger.write(tested | {"consensus": APART[method][step // 2 - 1] * (1 + seed)})
    return folder


def data_of(page: Path) -> list[dict[str, Any]]:
    text = page.read_text()
    start = text.index('type="application/json">') + len('type="application/json">')
    methods: list[dict[str, Any]] = json.loads(text[start : text.index("</script>", start)])["methods"]
    return methods


def test_the_page_has_distances_words_and_who_sent_to_whom(tmp_path: Path) -> None:
    published = publish(write(tmp_path, "dense()", LOCAL, GOSSIP))
    dense, local, gossip = data_of(published.report)
    assert dense["consensus_by_step"] is None and dense["talk"] is None
    assert local["consensus_by_step"]["y"] == [None, 4.0], "where ranks have just met nothing is drawn"
    assert [gossip["consensus_by_step"][key] for key in "xy"] == [[2, 4], [2, 1]]
    assert gossip["talk"] == [[0, 4], [4, 0]] and local["talk"] is None
    page = published.report.read_text()
    own = page[: page.index("<script>")]
    assert 'id="consensus_by_step"' in own and own.count("Who sent to whom") == 1
    assert f"<dt><code>{GOSSIP}</code></dt><dd>weights 0.75 to 1; staleness 0 to 2</dd>" in own
    assert f"<dt><code>{LOCAL}</code></dt><dd>2 rounds</dd>" in own
    assert [row.consensus for row in published.rows] == [0.0, 0.04, 0.01]


def test_a_run_of_methods_has_no_such_section(tmp_path: Path) -> None:
    write_run(tmp_path)
    run = read_run(tmp_path)
    assert together(run) == ""
    assert "How replicas stay together" not in publish(tmp_path).report.read_text()
    assert run.methods[0].seeds[0].notes == Notes()


def test_distances_are_means_over_seeds(tmp_path: Path) -> None:
    (method,) = read_run(write(tmp_path, GOSSIP, seeds=2)).methods
    curve = consensus_by_step(method)
    assert curve is not None
    assert curve.y.tolist() == pytest.approx([3.0, 1.5])
    assert curve.error.tolist() == pytest.approx([1.0, 0.5])
    published = publish(write(tmp_path / "local", LOCAL))
    assert data_of(published.report)[0]["loss_by_megabyte"]["x"] == [8e-05, 8e-05, 12e-05], "none at 0"
    assert (tmp_path / "local" / "loss.svg").read_text().count("<polyline") == 2


def test_a_run_that_has_sent_nothing_has_a_report(tmp_path: Path) -> None:
    with Ledger(tmp_path, CONFIG | {"methods": [LOCAL], "seeds": 1}) as ledger:
        for rank in range(2):
            ledger.write(step_event(LOCAL, 0, rank, 1) | {"payload_sent": 0, "network_sent": 0})
    (row,) = publish(tmp_path, "Interrupted.").rows
    assert row.payload_mb == 0 and row.smaller == float("inf")


def test_notes_are_read_whatever_is_missing() -> None:
    for told, expected in (
        ([], Notes()),
        ([{}, {"loss": 0.5}], Notes()),
        ([{"weight": float("nan")}, {"weight": 2.0}], Notes(weight=(2.0, 2.0))),
        ([{"peers": []}, {"peers": []}], Notes()),
        ([{"peers": [2]}, {"peers": [0, 2]}], Notes(talk=((0, 0, 1), (1, 0, 1), (0, 0, 0)))),
        ([{"rounds": 3}, {"rounds": 1}], Notes(rounds=3)),
    ):
        events = [{"rank": rank, "notes": notes} for rank, notes in enumerate(told)]
        assert read_notes([{"rank": 7}, *events]) == expected, told
    assert Notes().words() == ""
    assert Notes(rounds=1).words() == "1 round"
    assert Notes(weight=(1.0, 1.0), rounds=2000).words() == "weights 1; 2,000 rounds"
