"""The page of ZeroFL's masks says what was measured, and where it is not as in the paper."""

from __future__ import annotations

import math

from benchmarks.zerofl.page import names, written


def run(name: str, accuracy: float, *, split: str = "iid", seed: int = 0, uplink: float = 1e6) -> dict:
    nbytes = {"uplink_bytes": uplink, "csr_bytes": None if name[:2] in ("fe", "sw") else 4e5}
    return {"split": split, "name": name, "seed": seed, "accuracy": accuracy, "dense_bytes": 1e6} | nbytes


def test_a_table_has_the_mean_of_seeds_and_the_real_bytes() -> None:
    found = [run("fedavg", 0.5), run("B-0.1", 0.4, uplink=2e5), run("B-0.1", 0.42, seed=1, uplink=3e5)]
    page = written(found)
    assert "\n3 of 90 runs are done." in page
    assert "| dense FedAvg | 1 | 50.00 | 1,000 | 1.0 times |  |" in page
    assert "| B, `DiffOnTopWeights`, r = 0.1 | 2 | 41.00 ± 1.00 | 250 | 4.0 times | 400 |" in page
    assert "Skewed" not in page and "Comparison with the paper" not in page


def test_collapsed_seeds_are_counted_and_not_averaged() -> None:
    found = [run("fedavg", 0.4), run("fedavg", 0.1, seed=1) | {"test_loss": math.nan}, run("swat", 0.39)]
    page = written(found)
    assert "| dense FedAvg | 1, 1 collapsed | 40.00 |" in page and "Each at the best" not in page
    found += [
        run(name, 0.3 + seed / 100, seed=seed) for name in ("fedavg@0.1", "swat@0.1") for seed in (0, 1, 2)
    ]
    page = written(found)
    assert "| dense FedAvg, rate 0.1 | 3 | 31.00 ± 0.58 |" in page
    assert "dense FedAvg (0.1) reaches 31.00 ± 0.58 % and plain SWAT (0.1) 31.00 ± 0.58 %." in page


def test_the_paper_is_compared_over_the_seeds_that_both_have() -> None:
    assert "\n0 of 90 runs are done." in written([])
    found = [run(name, 0.4, split=split) for name in names() for split in ("iid", "dirichlet")]
    found += [run("A-0.2", 0.9, seed=1)]  # plain SWAT has no such seed yet
    assert written(found).count("| +0.00 | open: one seed |") == 4
    found = [run(name, 0.4, seed=seed) for name in names() for seed in (0, 1)]
    for row in found:
        lost = {"A-0": 0.1, "B-0": 0.1, "C-0": 0.1, "swat": 0.02 * row["seed"]}
        row["accuracy"] -= lost.get(row["name"], 0)
    page = written(found)
    assert "r = 0.1 above r = 0, mean of the masks | +5.68 | +10.00 ± 0.00 | yes |" in page
    assert "r = 0.2 below the whole model, mask A | -0.20 | +1.00 ± 1.00 | open |" in page
    found = [row | {"accuracy": 0.3} if row["name"] == "swat" else row for row in found]
    assert "mask A | -0.20 | +10.00 ± 0.00 | **no** |" in written(found)
