"""Advice on short trainings: a sparse method sends an entry about once in 1 / density steps."""

from __future__ import annotations

import logging
from typing import Any, cast

from laconic.codecs.selectors.density_schedule import has_density
from laconic.codecs.sparse import Sparse
from laconic.exchange.method import Method

MULTIPLE = (
    40  # of 1 / density, where dgc(density=0.01) is 0.4 points below dense training (docs/sparse_steps.md)
)

log = logging.getLogger("laconic")


def log_steps_needed(method: Method) -> None:
    density = lowest_density(method)
    if density is not None:
        log.info(
            "%s sends an entry about once in %.0f steps: a training run of fewer than about %.0f steps"
            " loses accuracy; a larger density= loses less",
            method,
            1 / density,
            MULTIPLE / density,
        )


def lowest_density(method: Method) -> float | None:
    """Return the lowest share of entries that a route with feedback sends after the warm-up, or None.

    >>> from laconic.exchange.method import lift
    >>> lowest_density(lift("dgc(density=0.01, warmup_steps=400)")), lowest_density(lift("cgx()"))
    (0.01, None)
    """
    found = []
    for route in method.routes:
        codec = route.reducer.feedback_codec() if route.feedback.keeps_unsent else None
        last = None if codec is None else codec.at(method.warm_at)
        if isinstance(last, Sparse) and has_density(last.select):
            found.append(float(cast(Any, last.select).density))
    return min((density for density in found if density < 1), default=None)
