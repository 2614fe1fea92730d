"""Plans of trainings of digits, and the events of a training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from laconic.tools.tasks import find
from laconic.tools.tasks.loading import prepare
from laconic.tools.tasks.settings import TrainingSettings

STEPS, BATCH = 6, 4
Events = list[dict[str, Any]]


def digits_plan(folder: Path, **settings: Any) -> TrainingSettings:
    """SGP on 16 digits a worker and step; the data are written into `folder`."""
    prepare(find("digits"), None, folder / "data.pt")
    return _plan(folder, {"model": None, "spec": "sgp()", "seed": 0, "batch": 16, **settings})


def noise_plan(folder: Path, train: int = 60, test: int = 11, **settings: Any) -> TrainingSettings:
    """Six steps of a small network on digits that are noise."""
    rng = torch.Generator().manual_seed(0)
    tensors = {}
    for part, n in (("train", train), ("test", test)):
        tensors[f"{part}_x"] = torch.randint(0, 17, (n, 1, 8, 8), dtype=torch.uint8, generator=rng)
        tensors[f"{part}_y"] = torch.randint(0, 10, (n,), dtype=torch.uint8, generator=rng)
    torch.save(tensors, folder / "data.pt")
    own = {"model": "mlp", "spec": "dense()", "seed": 3, "batch": BATCH, "workers": 2, "steps": STEPS}
    return _plan(folder, own | {"eval_every": 2} | settings)


def _plan(folder: Path, settings: dict[str, Any]) -> TrainingSettings:
    common = {"task": "digits", "lr": None, "checkpoint_every": 0, "threads": 1}
    return TrainingSettings(**(common | {"data": folder / "data.pt", "folder": folder} | settings))


def events_of(train: Callable[[Any, Callable[[Any], None]], Any], plan: TrainingSettings) -> Events:
    """The events of a training on this rank."""
    events: Events = []
    train(plan, events.append)
    return events


def told(events: Events, kind: str = "step", name: str = "loss") -> list[Any]:
    """A figure of all events of a kind."""
    return [event[name] for event in events if event["kind"] == kind]
