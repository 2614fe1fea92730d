"""The tasks by name."""

from __future__ import annotations

import difflib

from laconic.core.errors import SpecError
from laconic.tools.tasks.cifar10 import CIFAR10
from laconic.tools.tasks.digits import DIGITS
from laconic.tools.tasks.mnist import MNIST
from laconic.tools.tasks.shakespeare import SHAKESPEARE
from laconic.tools.tasks.task import Task

TASKS = {task.name: task for task in (DIGITS, MNIST, CIFAR10, SHAKESPEARE)}


def find(name: str) -> Task:
    """Return a task. Raises `SpecError`.

    >>> find("digits").name
    'digits'
    """
    if name in TASKS:
        return TASKS[name]
    near = difflib.get_close_matches(name, TASKS, n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the tasks are {', '.join(TASKS)}"
    raise SpecError(f"unknown task {name!r}: {hint}")
