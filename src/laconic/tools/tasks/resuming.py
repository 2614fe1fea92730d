"""Content of one rank's part of a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import nn

from laconic.core.errors import StateError
from laconic.strategies.distributed_optimizer import DistributedOptimizer
from laconic.tools.tasks.precision import Precision
from laconic.tools.tasks.settings import TrainingSettings
from laconic.tools.tasks.transforms import Transforms


def captured(
    settings: TrainingSettings,
    step: int,
    model: nn.Module,
    optimizer: DistributedOptimizer,
    precision: Precision,
    transforms: Transforms,
) -> dict[str, Any]:
    memory = optimizer.state_dict()  # first: it receives pending messages into the model
    return {
        "settings": settings.signature,
        "step": step,
        "model": model.state_dict(),
        "optimizer": memory,
        "precision": precision.state_dict(),
        **transforms.state_dict(),
    }


def restore(
    settings: TrainingSettings,
    state: dict[str, Any],
    model: nn.Module,
    optimizer: DistributedOptimizer,
    precision: Precision,
    transforms: Transforms,
) -> int:
    """Restore a state and return its number of steps."""
    done = check_same(settings, state)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    precision.load_state_dict(state.get("precision", {}))
    transforms.load_state_dict(state)
    return done


def check_same(settings: TrainingSettings, state: dict[str, Any]) -> int:
    """Return the number of steps of a state. Raises `StateError` if its settings differ."""
    for name, value in settings.signature.items():
        if state["settings"].get(name) != value:
            raise StateError(
                f"{settings.resume_from} was trained with {name}={state['settings'].get(name)!r}, not"
                f" {value!r}; use the same settings, or a new --name"
            )
    done: int = state["step"]
    return done
