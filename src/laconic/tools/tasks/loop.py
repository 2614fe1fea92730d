"""The training loop of a rank."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Any, Protocol

import torch.distributed as dist

from laconic.tools.tasks import checkpoint
from laconic.tools.tasks.decisions import Decisions
from laconic.tools.tasks.settings import Emit, Event, TrainingSettings
from laconic.tools.tasks.steps import due


class Work(Protocol):
    """Model and data of a rank's training. `done`: completed steps."""

    @property
    def done(self) -> int: ...

    def step(self) -> Iterable[Event]: ...

    def evaluate(self) -> Event:
        """Test the ranks' common model. Collective."""
        ...

    def state_dict(self) -> dict[str, Any]: ...


def train(settings: TrainingSettings, work: Work, emit: Emit) -> None:
    with closing(Decisions()) as decisions:
        while work.done < settings.steps:
            for event in work.step():
                emit(event | {"step": work.done})
            for decision in decisions.pop_all():
                emit({"kind": "decision", "step": work.done, "message": decision})
            if due(settings, work.done):
                emit(work.evaluate() | {"step": work.done})
            if settings.checkpoint_every and work.done % settings.checkpoint_every == 0:
                state = {"settings": settings.signature, "step": work.done} | work.state_dict()
                at = {"step": work.done, "rank": dist.get_rank(), "size": dist.get_world_size()}
                checkpoint.save(settings.folder, state, **at, barrier=dist.barrier)
