"""Rows of benchmarks: each is stored whole, under its key, beside those of other processes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from benchmarks.common.results import Results

ROWS = {"b-0": {"loss": 0.1 + 0.2, "curve": [[1, None]]}, "a/c-1": {"accuracy": 0.5}, "a/b-1": {"spec": "é"}}


def test_rows_come_back_by_key_and_by_group(tmp_path: Path) -> None:
    stored = Results(tmp_path / "some" / "results.jsonl")
    assert "b-0" not in stored and stored.get("b-0") is None and stored.rows() == [] == stored.groups()
    for key, row in ROWS.items():
        stored.put(key, row)
    assert all(key in stored and stored.get(key) == row for key, row in ROWS.items())
    assert stored.rows() == [ROWS["b-0"]] and stored.rows("a") == [ROWS["a/b-1"], ROWS["a/c-1"]]
    assert stored.groups() == ["a"]


def test_the_file_does_not_depend_on_the_order_of_runs(tmp_path: Path) -> None:
    there, back = Results(tmp_path / "there.jsonl"), Results(tmp_path / "back.jsonl")
    for key, row in ROWS.items():
        there.put(key, {"old": True})
        there.put(key, row)
    for key in reversed(ROWS):
        back.put(key, ROWS[key])
    assert there.file.read_bytes() == back.file.read_bytes()
    assert len(there.file.read_text().splitlines()) == len(ROWS)
    assert sorted(tmp_path.iterdir()) == [back.file, there.file]


def test_a_row_that_is_changed_after_reading_stays_as_stored(tmp_path: Path) -> None:
    stored = Results(tmp_path / "results.jsonl")
    stored.put("a", {"curve": [1]})
    (row,) = stored.rows()
    row["curve"].append(2)
    assert stored.get("a") == {"curve": [1]}


def test_processes_lose_no_rows_of_each_other(tmp_path: Path) -> None:
    stored = Results(tmp_path / "results.jsonl")
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(stored, name, 20)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [len(stored.rows(name)) for name in "ab"] == [20, 20]


def _write(stored: Results, name: str, rows: int) -> None:
    for number in range(rows):
        stored.put(f"{name}/{number:02}", {"number": number})
