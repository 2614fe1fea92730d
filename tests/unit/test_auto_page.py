"""The page of auto() says what was measured, and what was not reached."""

from __future__ import annotations

from benchmarks.auto import AFTERWARDS, AUTO, WAYS
from docs.auto_page import written

SECONDS = {way: [0.2 + 0.1 * i, 0.1 + 0.1 * i, 0.3 + 0.1 * i] for i, way in enumerate(WAYS)} | {AUTO: [0.25]}
FOUND = {
    "machine": {"cores": 2},
    "rounds": 3,
    "seeds": 3,
    "bar": 1.15,
    "steps": [
        {"link": None, "seconds": SECONDS, "best": WAYS[0], "ratio": 1.25, "said": ["sum(), at 200 ms"]}
    ],
    "drop": {"before": "1gbit", "after": "50mbit", "best_s": 0.3, "seconds": [1], "adapted": 31, "said": []},
    "loss": [
        {
            "link": "1gbit",
            "steps": 300,
            "rows": [
                {
                    "spec": AUTO,
                    "test_loss": {"mean": 1.5, "error": 0.01},
                    "step_s": {"mean": 0.05, "error": 0.0},
                }
            ],
        }
    ],
}


def test_the_page_says_how_far_auto_is_from_the_best() -> None:
    page = written(FOUND)
    assert "| `sum()` | 200 |" in page and "| `auto()` | 250 |" in page
    assert "unshaped: +25%" in page
    assert "From step 31 on steps stay within 15%" in page and "that is kept" in page
    assert "| 1gbit | `auto()` | 1.5000 ± 0.0100 | 50 |" in page


def test_what_was_not_reached_is_said() -> None:
    page = written(FOUND | {"drop": FOUND["drop"] | {"adapted": AFTERWARDS}})
    assert "Not steps" not in page
    assert "that is missed" in page
