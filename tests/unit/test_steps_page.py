"""The page of steps compares within a link, and says plainly which aims are kept and which are not."""

from __future__ import annotations

from typing import Any

from benchmarks.steps.contenders import AUTO, GOALS, NOTHING, WHOLE
from benchmarks.steps.page import written

COSTS = {"sent": 2e6, "processor_s": 0.3}
CODING = {"encode_s": 0.04, "communicate_s": 0.1, "decode_s": 0.01}


def rows_of(link: str, seconds: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {"link": link, "contender": contender, "step_s": step_s, "alone_s": 0.2, "efficiency": 0.2 / step_s}
        | (COSTS | CODING if "(" in contender else COSTS)
        for contender, step_s in seconds.items()
    ]


ALONE, DENSE, HOOK = "no communication", "DDP, dense", "PowerSGD hook, rank 1"
DGC, ONE_BUCKET = "dgc(density=0.001)", "dgc(density=0.001), one bucket"
FAST, SLOW = ({ALONE: 0.2, DENSE: dense, HOOK: 0.3, DGC: 0.26} for dense in (0.5, 2.5))
ROWS = rows_of("1gbit", FAST | {ONE_BUCKET: 0.22}) + rows_of("100mbit", SLOW | {ONE_BUCKET: 0.4})
GPT = {"name": "gpt", "hosts": 2, "about": "a GPT"}
MACHINE = {"cores": 2, "processor": "any", "torch": "2"}
FOUND = {"machine": MACHINE, "rounds": 3, "workloads": [GPT | {"rows": ROWS}]}
FORECAST = {"workload": "gpt", "link": "1gbit", "contender": DENSE, "forecast_s": 0.6, "measured_s": 0.5}


def test_aims_are_held_against_the_better_buckets_and_misses_are_said() -> None:
    page = written(FOUND, None)
    assert "| 2 hosts, 1gbit: efficiency of DGC at least 0.88 | 0.91 | yes |" in page
    assert "| 2 hosts, 100mbit: efficiency of DGC at least 0.88 | 0.77 | **no** |" in page
    assert "1gbit: DGC adds at most 0.5 of what PowerSGD's hook of rank 1 adds | 0.20 | yes |" in page
    assert "100mbit: DGC adds at most 0.5 of what PowerSGD's hook of rank 1 adds | 0.60 | **no** |" in page
    assert "DGC at least 12 times as fast as dense (no communication: 12.5) | 9.62 | **no** |" in page


def test_a_contender_stands_beside_dense_on_the_same_link() -> None:
    page = written(FOUND, None)
    shown = "| `dgc(density=0.001)`, one bucket | 0.220 | 0.91 | 2.3 times | 0.400 | 0.50 | 6.2 times |"
    assert shown in page
    assert "| DDP, dense | 0.500 | 0.40 |  | 2.500 | 0.08 |  | 2.00 | 0.300 |" in page


def test_forecasts_are_counted_and_judged() -> None:
    near, far = FORECAST | {"error": 0.2}, FORECAST | {"error": -0.3}
    kept = written(FOUND, {"near": 0.2, "rows": [near] * 4 + [far]})
    assert "4 of 5 are within 20 %; goal: 8 of 10. Met." in kept
    missed = written(FOUND, {"near": 0.2, "rows": [near] * 3 + [far] * 2})
    assert "3 of 5 are within 20 %; goal: 8 of 10. **Missed**." in missed


def test_without_a_slow_link_methods_are_held_against_dense() -> None:
    rows = rows_of("free", {ALONE: 0.2, DENSE: 0.5, DGC: 0.6, ONE_BUCKET: 0.45, AUTO: 0.52})
    page = written(FOUND, None, FOUND | {"rounds": 1, "workloads": [GPT | {"rows": rows}]})
    assert "median of 1 round:" in page
    assert f"| 2 hosts, a GPT: `{AUTO}` at most 1.03 times a dense step | 1.04 | **no** |" in page
    assert "| 2 hosts, a GPT: `dgc(density=0.001)` at most 1.1 times a dense step | 0.90 | yes |" in page


def test_methods_stand_next_to_a_hook_that_does_nothing() -> None:
    seconds = {name + buckets: 0.25 for name in GOALS for buckets in ("", WHOLE)} | {DGC: 0.225, NOTHING: 0.2}
    rows = [row | {"steps_s": [row["step_s"]] * 2} for row in rows_of("1gbit", seconds | {ALONE: 0.2})]
    page = written(FOUND, None, hook=FOUND | {"workloads": [GPT | {"rows": rows, "copy_s": 0.002}]})
    assert "| 1gbit | `dgc(density=0.001)` | 0.225 | 0.889 | 25 | 0 | 40 | 100 | 10 |" in page
    assert "the traffic of 4.5 copies, or about 9 ms." in " ".join(page.split())
    assert "| 2 hosts, 1gbit: share of `dgc(density=0.001)` at least 0.95 | 0.889 | **no** |" in page
    assert "| 2 hosts, 1gbit: share of `deft(density=0.001)` at least 0.9 | 0.800 | **no** |" in page
