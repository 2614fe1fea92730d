"""The page of training without a barrier says what was measured, and what was not reached."""

from __future__ import annotations

from typing import Any

from benchmarks.straggler.page import written


def asleep(spec: str, sleep_s: float, mean_s: float, slowest_s: float) -> dict[str, Any]:
    found = {"spec": spec, "sleep_s": sleep_s, "mean_s": mean_s, "slowest_s": slowest_s}
    return found | {"steps": 30, "share": 0.5, "sent_mb": 100.0}


def to_loss(spec: str, steps: int, seconds: int, sent_mb: float, losses: list[float]) -> dict[str, Any]:
    found = {"spec": spec, "steps": steps, "seconds": seconds, "sent_mb": sent_mb, "losses": losses}
    return found | {"reached": losses[-1] <= 1}


FOUND = {
    **{"machine": {"cores": 2}, "hosts": 8, "parameters": 11_000_000, "repeats": 3, "steps": 30},
    **{"links": {"asleep": "1gbit", "to_loss": "100mbit"}, "sleep_s": 0.3, "share": 0.5},
    "asleep": [
        *(asleep("dense()", 0.0, 10.0, 11.0), asleep("dense()", 0.3, 15.0, 15.5)),
        *(asleep("osgp(staleness=4)", 0.0, 4.0, 4.5), asleep("osgp(staleness=4)", 0.3, 4.8, 5.5)),
        *(asleep("adpsgd()", 0.0, 4.0, 4.5), asleep("adpsgd()", 0.3, 5.0, 9.0)),
    ],
    "to_loss": [
        to_loss("dense()", 40, 200, 3000.0, [2, 1]),
        to_loss("diloco()", 60, 50, 100.0, [0.9]),
        to_loss("local_sgd()", 160, 90, 9, [1.5]),
    ],
}


def test_the_page_compares_with_dense_in_the_same_conditions() -> None:
    page = written(FOUND)
    assert "| `adpsgd()` | 4.0 | 5.0 | 9.0 | 3.0 times faster | 100 |" in page
    assert "| `diloco()` | 60 | 0.9000 | 50 | 100 | 30.0 times |" in page
    assert "| overlapped gossip at least 2 times faster than dense | 3.12 times | yes |" in page
    assert "| AD-PSGD faster than overlapped gossip | 0.96 times | **no** |" in page
    assert "| at least 20 times fewer bytes to dense's loss | 30.00 times | yes |" in page
    assert "| `local_sgd()` | 160 | 1.5000 | 90 | 9 | not reached |" in page
