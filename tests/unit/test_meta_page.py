"""The page of meta-learning says what was measured, whichever way it came out."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.meta.page import figure, losses, verdict, written
from benchmarks.meta_reasons.__main__ import walk
from benchmarks.meta_reasons.page import NUMBERS, section

from laconic.federated.meta import PSGA, Learner, Local, Mlp, Sinusoids
from laconic.federated.meta.trained import Work


def run(name: str, *loss: float | None, seed: int = 0, accuracy: list[float] | None = None) -> dict[str, Any]:
    cost = {"up": 1_500_000, "down": 500_000, "joules_computing": 1.0, "joules_sending": 3.0}
    about = {"name": name, "seed": seed, "rounds": 50, "steps": [0, 1, 5, 10]}
    return about | {"loss": [*loss], "accuracy": accuracy} | cost


MEAN, MAML = run("mean of local models", 4.0, 3.0, 2.5, 2.0), run("MAML", 3.0, 0.5, 0.2, 0.1)


def test_a_row_holds_means_bytes_and_energy() -> None:
    rows = [MEAN, MAML, run("P-SGA", 4, 3, 2, 1), run("P-SGA", 4, 3, 2, 2, seed=1)]
    page = written({"sinusoids": rows}, [])
    shown = "4.00 ± 0.00 | 3.00 ± 0.00 | 2.00 ± 0.00 | 1.50 ± 0.50"
    assert f"| P-SGA | 2 | 50 | {shown} | 2.0 | 4.0 | 75 % |" in page
    assert "our reconstruction" in page
    assert figure([1.0, None]) == figure([1e9, 1.0]) == "diverged"
    assert not losses([]).x.size
    page = written({"digits": [run("MAML", 1, 1, 1, 1, accuracy=[0.2, 0.5, 0.75, 0.9])]}, [])
    assert "| MAML | 1 | 50 | 20.0 | 50.0 | 75.0 | 90.0 | 2.0 | 4.0 | 75 % |" in page


def test_a_loss_is_called_worse_and_a_gain_better() -> None:
    said = verdict([MEAN, MAML, run("P-SGA", 4, 3, 2, 1.5), run("P-SGA, eta=0.1", None, None, None, None)])
    assert said[0] == "The best of 1 variants of P-SGA is P-SGA: 1.50 after 10 steps."
    assert "- better than mean of local models (2.00); better in 1 of 1 seeds" in said
    assert "- **worse** than MAML (0.10); better in 0 of 1 seeds" in said


def test_a_sweep_stands_beside_the_mean_of_the_same_local_models() -> None:
    rows = [MEAN, run("mean of local models, steps=100", 4, 4, 4, 4), run("P-SGA, steps=100", 4, 4, 4, 3)]
    before, after = written({"sinusoids": rows}, []).split("### P-SGA's settings")
    assert "steps=100 |" not in before.split("### With")[1]
    assert "| mean of local models, steps=100 | 1 |" in after and "| P-SGA, steps=100 | 1 |" in after


def test_the_reasons_say_which_walk_ends_lower() -> None:
    def seed(ascent: float, descent: float) -> dict[str, Any]:
        ends = {"ascent": ascent, "projection alone": 2.0, "descent": descent}
        walks = {name: {"loss": [4.0, end], "agents": 3.0, "moved": 0.5} for name, end in ends.items()}
        return {"steps": [0, 10], "walks": walks, **dict.fromkeys(NUMBERS, 0.25)}

    said = section([seed(3.0, 1.0), seed(3.0, 2.0), seed(1.5, 3.0)])
    assert "| ascent | 4.00 | 2.50 | 3.00 | 0.50 |" in said
    assert "| cosine of ascent and the way to the mean | 0.250 |" in said
    assert "Descent ends lower after the last step in 2 of 3 seeds." in said
    higher = section([seed(1.0, 2.0)])
    assert "Descent ends higher after the last step in 1 of 1 seeds." in higher
    assert section([]) == []


def test_the_walk_of_the_reasons_is_that_of_psga() -> None:
    learner, agents = Learner(Mlp((1, 8, 8, 1))), Sinusoids(4, seed=1)
    first, plan = learner.network.first(), PSGA(rounds=5, eta=0.1, local=Local(steps=5))
    own = plan.local.train(learner, agents, first.repeat(4, 1), Work())
    climbed = plan.climb(learner, agents, first, own, Work()).weights
    assert torch.equal(walk(learner, agents, own, plan, plan.eta), climbed)
    assert not torch.equal(walk(learner, agents, own, plan, -plan.eta), climbed)
