"""The page on outer steps compares bytes to dense's loss, and does not claim what a run did not reach."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.outer.__main__ import DENSE, OTHERS, RATES, SEEDS, Run, best
from benchmarks.outer.page import fewer, written


def run(loss: float, sent: float, seed: int = 0, target: float = 1.5, step: int = 700) -> dict[str, Any]:
    about = {"seed": seed, "rate": 0.002, "target": target, "parameters": 1000}
    return about | {"curve": [(20, 3.0, sent / 50), (step, loss, sent)]}


def rows_of(loss: float, sent: float) -> list[dict[str, Any]]:
    return [run(loss, sent, seed) for seed in SEEDS]


def found(loss: float, sent: float) -> dict[str, list[dict[str, Any]]]:
    dense = [run(1.5, 1000.0, seed, target=0.0, step=600) for seed in SEEDS]
    return {"dense": dense} | {each.name: rows_of(loss, sent) for each in OTHERS}


def test_bytes_are_compared_where_dense_s_loss_was_reached() -> None:
    page = written(found(1.49, 4.0))
    assert "test loss of 1.500" in page
    spec = next(each.spec for each in OTHERS if each.name == "sparseloco")
    assert f"| sparseloco | `{spec}` | AdamW | 0.002 | 3 | 700 | 4 | 250 times | 0.32 |" in page
    assert "- `sparseloco`: 250 times fewer bytes to this loss; the goal of 100 is met." in page
    assert "the goal of 100 is missed" in written(found(1.5, 50.0))


def test_what_was_not_reached_is_said() -> None:
    page = written(found(1.51, 4.0))
    assert "| 3 | > 700 | > 4 | not reached | > 0.32 |" in page
    assert "- `sparseloco` does not reach dense's loss in 2.5 times its steps." in page
    few = found(1.49, 4.0) | {"sparseloco": [], "streaming": rows_of(1.49, 4.0)[:1]}
    assert "- `sparseloco`: 0 of 3 seeds are done." in written(few)
    assert "- `streaming`: 1 of 3 seeds are done." in written(few)
    assert "| rate |" not in written({each.name: [] for each in (DENSE, *OTHERS)})


def test_the_best_rate_reaches_the_loss_soonest() -> None:
    rows = [run(1.6, 4.0), run(1.4, 4.0, step=800), run(1.5, 4.0)]
    assert best([row | {"rate": rate} for rate, row in enumerate(rows, 1)]) == 3
    dense = [run(loss, 4.0, target=0.0, step=600) | {"rate": rate} for rate, loss in ((1, 1.6), (2, 1.4))]
    assert best(dense) == 2
    assert fewer([run(1.0, 2.0, 1)], {0: 1.0, 1: 100.0}) == pytest.approx(50), (
        "seeds have dense runs of their own"
    )
    runs = [Run(each, rate, seed) for each in (DENSE, *OTHERS) for rate in RATES for seed in SEEDS]
    assert len({each.key for each in runs}) == len(runs)
