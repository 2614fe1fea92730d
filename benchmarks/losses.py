"""What each method loses in test accuracy, for `laconic plan`: from trainings that other commands have done.

    python -m benchmarks.losses      writes src/laconic/tools/plan/losses.json; takes no time, trains nothing

The trainings are those of `python -m benchmarks.accuracy` on shards that are alike. Methods that apply
momentum before the exchange lose less since; those that `python -m benchmarks.own_rates` has trained on all
of AT_OWN_RATES, at learning rates of their own, have those losses. Casts are in none of them: where what a
cast loses of the stored gradient is below NEGLIGIBLE, it counts as nothing lost.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import laconic.tools.plan
from benchmarks.accuracy.contenders import MODELS, SETS
from benchmarks.accuracy.standings import standings
from benchmarks.own_rates.families import FAMILIES, LOCAL_MOMENTUM
from benchmarks.own_rates.page import points_lost
from laconic.strategies.distribute import strategy_or_method
from laconic.tools.cli.entries import figures
from laconic.tools.plan.losses import FIGURES

TARGET = Path(laconic.tools.plan.__file__).parent / FIGURES
CASTS, NEGLIGIBLE = ("fp16()", "bf16()"), 1e-5  # of |x|^2; fp16 has 6e-8, bf16 3e-6
DIGITS = 2  # after the point
AT_OWN_RATES = [family for family in FAMILIES if "before compression" in family.name]


def losses() -> str:
    """The content of the file: by spec and task, points of accuracy below dense training."""
    found: dict[str, dict[str, float]] = {"dense()": dict.fromkeys(MODELS, 0.0)}
    for contenders in reversed(SETS.values()):  # if it is in several sets, the one with four workers wins
        for task in MODELS:
            for each in standings(task, contenders):
                if each.contender.skew is None and each.contender.spec != each.contender.against:
                    found.setdefault(each.contender.spec, {})[task] = round(each.lost.mean, DIGITS)
    for spec in LOCAL_MOMENTUM.others:
        lost = {family.folder: points_lost(spec, family) for family in AT_OWN_RATES}
        if all(lost.values()):
            means = {folder: round(mean(points), DIGITS) for folder, points in lost.items()}
            found[repr(strategy_or_method(spec))] = means
    for spec in CASTS:
        error = figures()[spec].error
        if error is not None and error < NEGLIGIBLE:
            found[spec] = {"stored gradient": 0.0}
    about = "points of test accuracy below dense training with the same optimiser, mean over seeds"
    return json.dumps({"about": about, "lost": dict(sorted(found.items()))}, indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(losses(), encoding="utf-8")
    print(f"written to {TARGET}")
