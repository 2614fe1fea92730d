"""What each method loses in test accuracy, for `laconic plan`: from trainings that other commands have done.

    python -m benchmarks.losses      writes src/laconic/plan/losses.json; takes no time, trains nothing

The trainings are those of `python -m benchmarks.accuracy` on shards that are alike, and those of fp16 are of
`make demo`: rounding to 16 bits is in no other.
"""

from __future__ import annotations

import json
from pathlib import Path

import laconic.plan
from benchmarks.contenders import MODELS, SETS
from benchmarks.standings import standings
from laconic.plan.losses import FIGURES

TARGET = Path(laconic.plan.__file__).parent / FIGURES
DEMO = Path(__file__).parent / "results" / "demo.json"
DIGITS = 2  # after the point


def losses() -> str:
    """The content of the file: by spec and task, points of accuracy below dense training."""
    found: dict[str, dict[str, float]] = {"dense()": dict.fromkeys(MODELS, 0.0)}
    for contenders in reversed(SETS.values()):  # if it is in several sets, the one with four workers wins
        for task in MODELS:
            for each in standings(task, contenders):
                if each.contender.skew is None and each.contender.spec != each.contender.against:
                    found.setdefault(each.contender.spec, {})[task] = round(each.lost.mean, DIGITS)
    rows = {row["spec"]: row["accuracy"]["mean"] for row in json.loads(DEMO.read_text())["rows"]}
    found["fp16()"] = {"digits": round(100 * (rows["dense()"] - rows["fp16()"]), DIGITS)}
    about = "points of test accuracy below dense training with the same optimiser, mean over seeds"
    return json.dumps({"about": about, "lost": dict(sorted(found.items()))}, indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(losses(), encoding="utf-8")
    print(f"written to {TARGET}")
