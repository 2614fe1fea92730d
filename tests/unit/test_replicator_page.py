"""The page of the Replicator: its code runs, and its figures are those of the runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks.replicator.__main__ import ASYNC, GROUPS, SYNC, Case, cases
from benchmarks.replicator.page import histogram, script, written

import laconic

ROOT = Path(__file__).parents[2]


def run(spec: str, sleep_s: float, seconds: float, **other: Any) -> dict[str, Any]:
    case = {"spec": spec, "sleep_s": sleep_s, "share": 0.5, "gradients": 480}
    told = {"refused": 0, "loss": 1.0, "staleness": {"0": 3, "2": 1}, "machine": {"cores": 2}}
    return {"case": case, "seconds": seconds} | told | other


ROWS = [
    *(
        run(SYNC, sleep_s, seconds)
        for sleep_s, seconds in ((0.0, 2.0), (0.3, 18.0), (0.3, 22.0), (0.3, 20.0))
    ),
    *(run(ASYNC, 0.3, 8.0, refused=7), run(GROUPS, 0.3, 16.0)),
]


def test_the_page_compares_with_sync_beside_the_sleeper() -> None:
    text = written(ROWS)
    assert f"| `{SYNC}` | 2.0 | 20.0 | 1.0 times faster | 0 | 1.000 |" in text
    assert f"| `{ASYNC}` | - | 8.0 | 2.5 times faster | 7 | 1.000 |" in text
    assert "2.50 times | yes" in text
    assert "**no**" in written([*ROWS, run(ASYNC, 0.3, 30.0)])
    assert "Not measured yet" in written(ROWS[:-1])


def test_the_histogram_has_all_gradients() -> None:
    bands = histogram([run(ASYNC, 0.3, 1.0), run(ASYNC, 0.3, 1.0, staleness={"0": 1, "40": 3})])
    assert bands[0] == ("0", "50.0")
    assert bands[1] == ("1 to 2", "12.5")
    assert bands[-1] == ("33 to 64", "37.5")


def test_every_run_has_a_key_of_its_own() -> None:
    keys = [case.key for case in cases(repeats=3)]
    assert len({*keys}) == len(keys) == 18
    assert Case(ASYNC, 0.3, 2).key == "async-asleep-2"
    for name in ("single", "sync", "local", "asynchronous", "groups"):
        assert laconic.parse(name).name == name


def test_the_script_is_short_and_the_pages_code_runs() -> None:
    assert len(script().splitlines()) <= 45
    text = (ROOT / "docs" / "replicator.md").read_text()
    shown, *blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert shown in script()
    assert blocks
    for block in blocks:
        exec(block, {"__name__": "page"})
    page: dict[str, Any] = {"__name__": "page"}
    exec(shown, page)
    assert laconic.Replicator("local(replicas=2)").launch(page["main"])[0] < 0.2
