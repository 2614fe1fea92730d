"""The page of auto() says what was measured, and what was not reached."""

from __future__ import annotations

from benchmarks.auto.__main__ import AFTERWARDS, AUTO, FIXED, bars
from benchmarks.auto.page import written
from benchmarks.steps.contenders import DENSE

SECONDS = {spec: [0.2 + 0.1 * i, 0.1 + 0.1 * i, 0.3 + 0.1 * i] for i, spec in enumerate(FIXED)}
ONE = {"seconds": {DENSE: [0.2], AUTO: [0.4]}, "alone": {DENSE: [0.1], AUTO: [0.2]}}
ALONE = {DENSE: [0.1], AUTO: [0.1]}
STEPS = {
    "link": None,
    "seconds": SECONDS | {DENSE: [0.2], AUTO: [0.25]},
    "alone": ALONE,
    "best": FIXED[0],
    "ratio": 1.25,
}
DROP = {"before": "1gbit", "after": "50mbit", "best_s": 0.3, "said": []}
AFTER = [1.0] * 31 + [0.31] * (AFTERWARDS - 31)
LOSSES = [
    {"spec": spec, "test_loss": {"mean": mean, "error": 0.01}, "step_s": {"mean": 0.05, "error": 0.0}}
    for spec, mean in ((FIXED[1], 1.51), (AUTO, 1.5))
]
FOUND = {
    "machine": {"cores": 2},
    "rounds": 3,
    "seeds": 3,
    "steps": [STEPS | {"said": ["sum(), at 200 ms"]}],
    "one": ONE,
    "drop": DROP | {"seconds": AFTER},
    "loss": [{"link": "1gbit", "steps": 300, "rows": LOSSES}],
}


def test_the_page_says_how_far_auto_is_from_the_best() -> None:
    page = written(FOUND)
    assert "Start with dense steps." in page
    assert "| `sum()` | 200 |" in page and f"| `{AUTO}` | 250 |" in page
    assert "| unshaped: a step at most 1.1 times the best candidate's | 1.25 | no |" in page
    assert "| unshaped: a step at most 1.05 times plain DDP's | 1.25 | no |" in page
    assert "| one host: a step at most 1.05 times plain DDP's | 1.00 | yes |" in page
    assert "| from step 30 on | yes |" in page
    assert "| -0.0100 ± 0.0141 | yes |" in page
    assert f"| 1gbit | `{AUTO}` | 1.5000 ± 0.0100 | 50 |" in page


def test_what_was_not_reached_is_said() -> None:
    never = FOUND | {"drop": FOUND["drop"] | {"seconds": [1.0] * AFTERWARDS}}
    assert "| in none of the steps that followed | no |" in written(never)


def test_bars_are_of_what_was_measured() -> None:
    assert [bar.kept for bar in bars(FOUND)] == [False, False, True, True, True]
    assert bars({}) == []
