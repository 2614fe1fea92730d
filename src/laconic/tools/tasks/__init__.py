"""Built-in training tasks: real data and small models, deterministic in (seed, rank, step)."""

from laconic.tools.tasks.catalogue import TASKS as TASKS
from laconic.tools.tasks.catalogue import find as find
from laconic.tools.tasks.task import Task as Task

__all__ = ["TASKS", "Task", "find"]
