"""Built-in training tasks, deterministic in (seed, rank, step)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laconic.core.lazy import import_lazily

if TYPE_CHECKING:
    from laconic.tools.tasks.catalogue import TASKS as TASKS
    from laconic.tools.tasks.catalogue import find as find
    from laconic.tools.tasks.task import Task as Task

__all__ = ["TASKS", "Task", "find"]

import_lazily(
    __name__,
    {
        "TASKS": "laconic.tools.tasks.catalogue",
        "Task": "laconic.tools.tasks.task",
        "find": "laconic.tools.tasks.catalogue",
    },
)
