"""The page's table of outer momenta has what is stored, and blanks for the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.common.results import Results
from benchmarks.outer import inside


def test_the_table_has_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "RUNS", Results(tmp_path / "results.jsonl"))
    assert [*inside.section()] == []
    adamw = inside.INSIDE[1]
    diverged = "diloco(every=100, lr=0.7, momentum=0.9)"
    inside.RUNS.put(adamw.key(diverged), {inside.DIVERGED: "too fast"})
    for spec, accuracy in (("dense()", 0.5), ("diloco(every=30, lr=0.7, momentum=0.5)", 0.4)):
        inside.RUNS.put(adamw.key(spec), {"accuracy": accuracy})
    told = [line for line in inside.section() if line.startswith("| AdamW")]
    assert told == [
        "| AdamW | 0.008 | 600 | 30 | 20 | 50.00 |  | 40.00 |  |",
        "| AdamW | 0.008 | 600 | 100 | 6 | 50.00 | diverged |  |  |",
    ]
