"""Warnings of `laconic train` about allowed but perhaps unintended requests."""

from __future__ import annotations

from laconic.exchange.method import Method
from laconic.strategies.distribute import strategy_or_method
from laconic.tools.cli.pipelining import warm_at
from laconic.tools.cli.settings import Settings


def cautions(settings: Settings) -> list[str]:
    return [*_cold(settings), *_impatient(settings), *_adaptive(settings)]


def _cold(settings: Settings) -> list[str]:
    warm = warm_at(settings.pipeline, settings.specs)
    return [
        f"{spec} warms up for {first:,} steps and this run has {settings.steps:,}, so it never finishes its"
        " warm-up; use a shorter warm-up, or more --steps"
        for spec, first in warm.items()
        if first >= settings.steps
    ]


def _impatient(settings: Settings) -> list[str]:
    if settings.patience is None:
        return []
    return [
        f"{spec} needs all workers, so --patience has no effect on it: a lost worker ends its training"
        for spec in settings.specs
        if isinstance(strategy_or_method(spec), Method)
    ]


def _adaptive(settings: Settings) -> list[str]:
    if settings.pipeline is not None or not (settings.resume or settings.checkpoint_every):
        return []
    return [
        f"{spec} decides by timing, so a resumed run does not end with the same bits; to get them, pin"
        ' its choice, such as "auto(pinned=scatter_reduce(minmax(block=128)))"'
        for spec in settings.specs
        if isinstance(made := strategy_or_method(spec), Method) and made.adaptive
    ]
