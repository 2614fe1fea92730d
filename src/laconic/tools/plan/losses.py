"""Measured loss of test accuracy of methods: points below dense training with the same optimiser.

`python -m benchmarks.losses` writes `losses.json` from the trainings of docs/accuracy.md and own_rates.md.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib.resources import files

FIGURES = "losses.json"
WARM_UP = re.compile(r"(?:, )?warmup_steps=\d+")  # it hardly affects the loss


def points_lost(spec: str) -> float | None:
    """Return the points of accuracy that a spec loses on its worst task; None: not measured.

    >>> points_lost("dense()"), points_lost("topk(density=0.5)")
    (0.0, None)
    >>> points_lost("dgc(density=0.01)") == points_lost("dgc(density=0.01, warmup_steps=100)")
    True
    """
    return _losses().get(without_warm_up(spec))


def without_warm_up(spec: str) -> str:
    """Remove the length of a warm-up.

    >>> without_warm_up("dgc(warmup_steps=100)"), without_warm_up("dgc(density=0.01, warmup_steps=100)")
    ('dgc()', 'dgc(density=0.01)')
    """
    return WARM_UP.sub("", spec)


@lru_cache(maxsize=1)
def _losses() -> dict[str, float]:
    found = json.loads((files("laconic.tools.plan") / FIGURES).read_text(encoding="utf-8"))["lost"]
    return {without_warm_up(spec): max(0.0, *tasks.values()) for spec, tasks in found.items()}
