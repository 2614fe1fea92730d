"""The page of meta-learning says what was measured, whichever way it came out."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.meta import figure, losses, verdict, written


def run(name: str, *loss: float | None, seed: int = 0, accuracy: list[float] | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "seed": seed,
        "rounds": 50,
        "steps": [0, 1, 5, 10],
        "loss": [*loss],
        "accuracy": accuracy,
        "up": 1_500_000,
        "down": 500_000,
        "joules_computing": 1.0,
        "joules_sending": 3.0,
    }


MEAN, MAML = run("mean of local models", 4.0, 3.0, 2.5, 2.0), run("MAML", 3.0, 0.5, 0.2, 0.1)


def test_a_row_holds_means_bytes_and_energy() -> None:
    page = written({"sinusoids": [MEAN, MAML, run("P-SGA", 4, 3, 2, 1), run("P-SGA", 4, 3, 2, 2, seed=1)]})
    assert (
        "| P-SGA | 2 | 50 | 4.00 ± 0.00 | 3.00 ± 0.00 | 2.00 ± 0.00 | 1.50 ± 0.50 | 2.0 | 4.0 | 75 % |"
        in page
    )
    assert "our reconstruction" in page


def test_a_loss_is_called_worse_and_a_gain_better() -> None:
    said = verdict([MEAN, MAML, run("P-SGA", 4, 3, 2, 1.5), run("P-SGA, eta=0.1", None, None, None, None)])
    assert said[0] == "The best of 1 variants of P-SGA is P-SGA: 1.50 after 10 steps."
    assert "- better than mean of local models (2.00); better in 1 of 1 seeds" in said
    assert "- **worse** than MAML (0.10); better in 0 of 1 seeds" in said


def test_what_is_not_finite_has_diverged() -> None:
    assert figure([1.0, None]) == figure([1e9, 1.0]) == "diverged"
    assert not losses([]).x.size


def test_digits_show_accuracy() -> None:
    page = written({"digits": [run("MAML", 1, 1, 1, 1, accuracy=[0.2, 0.5, 0.75, 0.9])]})
    assert "| MAML | 1 | 50 | 20.0 | 50.0 | 75.0 | 90.0 | 2.0 | 4.0 | 75 % |" in page
