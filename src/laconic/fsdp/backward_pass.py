"""Start and end of the backward pass of a model under `fully_shard`.

gradient of the model's output -> `enter` at each exchange -> `end`
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle


class BackwardPass:
    """Current backward pass of a model.

    Reentrant activation checkpointing runs nested passes with other autograd numbers; `watch` detects them.
    """

    def __init__(self) -> None:
        self._end: Callable[[], object] | None = None  # only during a pass: no cycle keeps the model
        self._task = -1
        self._open = False

    def watch(self, model: nn.Module) -> RemovableHandle:
        return model.register_forward_hook(self._mark)

    def enter(self, end: Callable[[], object]) -> bool:
        """Register an exchange, and `end` to call after the pass. Return whether it is the first."""
        task: int = torch._C._current_graph_task_id()
        if task < 0:  # outside of a pass each exchange is a pass without an end
            return True
        if task != self._task and not self._open:
            self._begin(task)
        first, self._end = self._end is None, end
        return first

    @torch._disable_dynamo  # type: ignore[attr-defined]  # keeps hooks out of compiled graphs
    def _mark(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() < 0:  # the open pass has raised
            self._task, self._open, self._end = -1, False, None
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(self._reached)  # type: ignore[no-untyped-call]

    def _reached(self, gradient: Tensor) -> None:
        task: int = torch._C._current_graph_task_id()
        if task != self._task:  # also if an earlier pass raised
            self._begin(task)

    def _begin(self, task: int) -> None:
        self._task, self._open, self._end = task, True, None
        Variable._execution_engine.queue_callback(partial(self._close_last, task))

    def _close_last(self, task: int) -> None:
        """Close the pass after FSDP2's callbacks, which reduce the remaining gradients."""
        Variable._execution_engine.queue_callback(partial(self._close, task))

    def _close(self, task: int) -> None:
        if task == self._task:
            end, self._end, self._open = self._end, None, False
            if end is not None:
                end()
