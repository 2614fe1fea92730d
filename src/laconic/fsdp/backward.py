"""Exchanges of sharded gradients that overlap the backward pass.

On a CPU, FSDP2 waits for a reduce-scatter on autograd's thread, then only makes views of the output, which
need not be filled before backward returns. On a GPU a job runs immediately, on FSDP2's stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from laconic.comm.communication_thread import Answer, CommunicationThread

MAX_IN_FLIGHT = 2  # as FSDP2 itself holds


class OverlappedExchanges:
    def __init__(self, name: str) -> None:
        self._thread = CommunicationThread(name)
        self._under_way: deque[Answer] = deque()

    def fill(self, output: Tensor, job: Callable[[], object], group: Any) -> None:
        """Run `job`, which fills the output: before backward returns if FSDP2's group allows it, else now."""
        if output.device.type != "cpu":
            job()
            return
        answer = self._submit(job)
        if not may_wait(output, group):
            self._thread.wait(answer)
            return
        Variable._execution_engine.queue_callback(partial(self._thread.wait, answer))
        self._under_way.append(answer)
        if len(self._under_way) > MAX_IN_FLIGHT:
            self._thread.wait(self._under_way.popleft())

    def finish(self, job: Callable[[], object]) -> None:
        self._thread.wait(self._submit(job))

    def close(self) -> None:
        self._under_way.clear()
        self._thread.end()

    def _submit(self, job: Callable[[], object]) -> Answer:
        def done() -> Tensor:
            job()
            return torch.empty(0, dtype=torch.float32, device="cpu")

        return self._thread.submit(done)


def may_wait(output: Tensor, group: Any) -> bool:
    """Return whether FSDP2 only makes views of this output in this backward pass.

    Otherwise it reads it now, to cast, divide, accumulate or offload it, or to call hooks.
    """
    return (
        torch._C._current_graph_task_id() >= 0
        and output.dtype in (torch.float32, torch.bfloat16)
        and group.gradient_divide_factor is None
        and not getattr(group, "force_sum_reduction_for_comms", True)
        and not any(reads_immediately(each, output.dtype) for each in group.fsdp_params)
    )


def reads_immediately(parameter: Any, dtype: torch.dtype) -> bool:
    shard = parameter.sharded_param
    # `sharded_grad_dtype`: from torch 2.15 on
    if getattr(parameter, "sharded_grad_dtype", parameter.orig_dtype) != dtype:
        return True
    hooks = getattr(shard, "_post_accumulate_grad_hooks", None)
    return bool(shard.grad is not None or parameter.offload_to_cpu or hooks)
