"""The page on precision compares with float32 of the same method and seeds, and says what is missing."""

from __future__ import annotations

from benchmarks.precision.__main__ import METHODS, PRECISIONS, cells
from benchmarks.precision.page import written


def run(precision: str, method: str, seed: int, loss: float, skipped: int = 0) -> dict[str, object]:
    about = {"precision": precision, "method": method, "seed": seed}
    return about | {"test_loss": loss, "train_loss": loss / 2, "wire_kb": 12.34, "skipped": skipped}


def test_a_cell_is_the_difference_from_float32_with_the_same_seeds() -> None:
    method = METHODS[0]
    rows = [run("fp32", method, seed, 1.0 + seed) for seed in range(3)]
    rows += [run("fp16", method, seed, 1.1 + seed, skipped=2) for seed in range(3)]
    text = written(rows)
    assert "| `dense()` | 2.000 | - | 2.100 (+0.100 ± 0.000) | - |" in text
    assert "| `dense()` | 12.3 | - | 12.3 | - |" in text
    assert "| `dense()` | 2.0 | - |" in text.partition("### Skipped steps")[2]
    assert "mean over 3 seeds." in text
    assert "mean over the 1 to 3 seeds that are done of 3." in written([*rows, run("bf16", method, 0, 1.0)])


def test_every_precision_meets_every_method_with_every_seed() -> None:
    every = [*cells()]
    assert len(every) == len({cell.key for cell in every}) == len(PRECISIONS) * len(METHODS) * 3
    assert "## Measured" not in written([])
