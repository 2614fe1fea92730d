"""Check that a checkpoint belongs to a training."""

from __future__ import annotations

from typing import Any

from laconic.core.errors import StateError
from laconic.tools.tasks.settings import TrainingSettings


def check_same(settings: TrainingSettings, state: dict[str, Any]) -> int:
    """Return a state's number of steps. Raises `StateError` if settings differ."""
    for name, value in settings.signature.items():
        if state["settings"].get(name) != value:
            raise StateError(
                f"{settings.resume_from} was trained with {name}={state['settings'].get(name)!r}, not"
                f" {value!r}; use the same settings, or a new --name"
            )
    done: int = state["step"]
    return done
