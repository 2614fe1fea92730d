"""What `laconic train` says before it begins about requests that are allowed, and perhaps not meant."""

from __future__ import annotations

from laconic.cli.pipelining import warm_at
from laconic.cli.settings import Settings
from laconic.exchange.method import Method
from laconic.strategies.distribute import strategy_or_method


def cautions(settings: Settings) -> list[str]:
    """One line for each method that never gets past its warm-up, needs all workers, or resumes otherwise."""
    return [*_cold(settings), *_impatient(settings), *_adaptive(settings)]


def _cold(settings: Settings) -> list[str]:
    """Methods that would still be warming up at the last step."""
    warm = warm_at(settings.pipeline, settings.specs)
    return [
        f"{spec} warms up for {first:,} steps and this run has {settings.steps:,}, so it never gets past its"
        " warm-up; give it a shorter warm-up, or more --steps"
        for spec, first in warm.items()
        if first >= settings.steps
    ]


def _impatient(settings: Settings) -> list[str]:
    """Methods beside strategies that go on without a lost worker."""
    if settings.patience is None:
        return []
    return [
        f"{spec} needs all workers, so --patience has no effect on it: a lost worker ends its training"
        for spec in settings.specs
        if isinstance(strategy_or_method(spec), Method)
    ]


def _adaptive(settings: Settings) -> list[str]:
    """Methods that measure the link, so that no two runs do the same, where runs are to be resumed."""
    if settings.pipeline is not None or not (settings.resume or settings.checkpoint_every):
        return []
    return [
        f"{spec} decides by the time that steps take, so a resumed run does not end with the same bits; pin"
        ' what it settles on for that, such as "auto(pinned=scatter_reduce(minmax(block=128)))"'
        for spec in settings.specs
        if isinstance(made := strategy_or_method(spec), Method) and made.adaptive
    ]
