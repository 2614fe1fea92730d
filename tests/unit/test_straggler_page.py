"""The page of training without a barrier says what was measured, and what was not reached."""

from __future__ import annotations

from benchmarks.pages.straggler import written

ASLEEP = {"steps": 30, "share": 0.5, "sent_mb": 100.0}
FOUND = {
    "machine": {"cores": 2},
    "hosts": 8,
    "parameters": 11_000_000,
    "repeats": 3,
    "steps": 30,
    "links": {"asleep": "1gbit", "to_loss": "100mbit"},
    "sleep_s": 0.3,
    "share": 0.5,
    "asleep": [
        ASLEEP | {"spec": "dense()", "sleep_s": 0.0, "mean_s": 10.0, "slowest_s": 11.0},
        ASLEEP | {"spec": "dense()", "sleep_s": 0.3, "mean_s": 15.0, "slowest_s": 15.5},
        ASLEEP | {"spec": "osgp(staleness=4)", "sleep_s": 0.0, "mean_s": 4.0, "slowest_s": 4.5},
        ASLEEP | {"spec": "osgp(staleness=4)", "sleep_s": 0.3, "mean_s": 4.8, "slowest_s": 5.5},
        ASLEEP | {"spec": "adpsgd()", "sleep_s": 0.0, "mean_s": 4.0, "slowest_s": 4.5},
        ASLEEP | {"spec": "adpsgd()", "sleep_s": 0.3, "mean_s": 5.0, "slowest_s": 9.0},
    ],
    "to_loss": [
        {
            "spec": "dense()",
            "steps": 40,
            "seconds": 200,
            "sent_mb": 3000.0,
            "losses": [2, 1],
            "reached": True,
        },
        {"spec": "diloco()", "steps": 60, "seconds": 50, "sent_mb": 100.0, "losses": [0.9], "reached": True},
        {"spec": "local_sgd()", "steps": 160, "seconds": 90, "sent_mb": 9, "losses": [1.5], "reached": False},
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
