"""The page of large batches says what was measured, and its code runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from benchmarks.large_batch import BASE, EXAMPLES, drawn, trials
from benchmarks.pages.large_batches import copies_of, large_of, noise_scale
from benchmarks.pages.write import ROOT


def run(kind: str, times: int, accuracy: float, seed: int = 0) -> dict[str, Any]:
    steps = EXAMPLES // (BASE * times)
    noise = [{"step": steps // 4, "variance": 1.0, "signal": 1.0}]
    noise += [{"step": steps, "variance": 24.0, "signal": 1.0}]
    told = {"kind": kind, "times": times, "accuracy": accuracy, "seed": seed, "steps": steps}
    return {**told, "noise": noise, "noise_unit": 32}


def test_a_table_has_points_lost_and_what_the_noise_predicts() -> None:
    runs = [run("sgd", 1, 0.6), run("sgd", 1, 0.62, 1), run("lamb", 8, 0.605), run("lars", 8, 0.55)]
    page = large_of(runs, 36)
    assert noise_scale(runs[:2]) == 768
    left = 100 * (64 + 768) / (512 + 768)
    assert f"| 512 | 640 | LAMB | 60.50 | -0.50 | {left:.0f} |" in page
    assert "| 64 | 5,120 | SGD, linear scaling | 61.00 ± 1.00 | +0.00 | 100 |" in page
    assert "LAMB is within 1.5 points of the small batch: it loses 0.50" in page
    assert "4 of 36 runs are in" in page
    assert copies_of([], 15).endswith("0 of 15 runs are in `benchmarks/results/augmentation/`.")


def test_a_recipe_that_fails_is_said_to_fail() -> None:
    page = large_of([run("sgd", 1, 0.6), run("lars", 8, 0.5)], 36)
    assert "LARS is **not** within 1.5 points of the small batch: it loses 10.00" in page


def test_copies_are_compared_at_equal_steps() -> None:
    def copied(name: str, last: float) -> dict[str, Any]:
        curve = [[step, last * step / 6, 1.0] for step in range(1, 7)]
        told = {"variant": name, "seed": 0, "accuracy": last, "curve": curve}
        return {**told, "inputs": 400, "read": 100}

    page = copies_of([copied("M=1", 0.6), copied("M=4", 0.66)], 15)
    assert "| M=4 | 1 | 22.00 | 44.00 | 66.00 | -6.00 | 400 | 100 |" in page


def test_the_pages_code_runs() -> None:
    text = (ROOT / "docs" / "large_batches.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    exec("\n".join(blocks), {"__name__": "page"})


@pytest.mark.parametrize("times", [1, 8])
def test_every_batch_sees_the_same_examples_in_the_same_order(times: int) -> None:
    n = 100
    data = {"train_x": torch.zeros(n, 3, 32, 32, dtype=torch.uint8), "train_y": torch.arange(n)}
    seen = torch.cat([drawn(data, 3, step, 10 * times)[1] for step in range(240 // (10 * times))])
    small = torch.cat([drawn(data, 3, step, 10)[1] for step in range(24)])
    assert torch.equal(seen, small)
    assert sorted(seen[:n].tolist()) == list(range(n))


def test_a_run_is_planned_once() -> None:
    files = [trial.file for trial in trials()]
    assert len(set(files)) == len(files) == 36
