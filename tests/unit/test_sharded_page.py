"""The page of sharded models says what its runs say, and no more."""

from __future__ import annotations

from typing import Any

from benchmarks.sharded.__main__ import DENSE, OTHERS
from benchmarks.sharded.page import block_of


def row(seed: int, sent: float, loss: float) -> dict[str, Any]:
    return {"seed": seed, "all_gather": 2 * sent, "reduce_scatter": sent, "curve": [[100, 9.0], [500, loss]]}


def test_without_full_precision_nothing_is_compared() -> None:
    text = block_of({DENSE.name: [], OTHERS[0].name: [row(0, 1e9, 2.0)], OTHERS[1].name: []})
    assert "1 of 9 are done" in text and "|" not in text and "goal" not in text


def test_losses_are_compared_seed_by_seed_and_bars_are_judged() -> None:
    eight, four = OTHERS
    runs = {
        DENSE.name: [row(0, 4e9, 2.0), row(1, 4e9, 2.5)],
        eight.name: [row(0, 1e9, 2.01), row(1, 1e9, 2.5), row(2, 1e9, 7.0)],
        four.name: [row(1, 1e9, 2.6)],
    }
    text = block_of(runs)
    assert "| 4.00 |" in text and "| +0.25 |" in text and "| +4.00 |" in text
    first, second = text.splitlines()[-2:]
    assert "bytes is met" in first and "1 % is met" in first
    assert "bytes is **missed**" in second and "1 % is **missed**" in second
