"""Built-in training tasks: real data, small models, everything a function of (seed, rank, step)."""

from laconic.tasks.catalogue import TASKS as TASKS
from laconic.tasks.catalogue import find as find
from laconic.tasks.task import Task as Task

__all__ = ["TASKS", "Task", "find"]
