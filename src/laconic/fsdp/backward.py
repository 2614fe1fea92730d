"""Exchanges of sharded gradients beside the backward pass, on a communication thread.

FSDP2 calls a reduce-scatter on autograd's thread, and on a CPU that waits for it. What it does with the
result then is to make views of it, the gradients of the shards: so these may be filled while backward goes
on, if they are before it returns. Two modules are under way at a time, which bounds the memory.

On a GPU FSDP2 has streams for this, and a job runs where it is called; the host reads its flags there, once.
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

UNDER_WAY = 2  # as many inputs of reduce-scatters FSDP2 itself keeps, with its own on a stream


class BesideBackward:
    """Fills the outputs of one model's exchanges, in the order of the calls."""

    def __init__(self, name: str) -> None:
        self._thread = CommunicationThread(name)
        self._under_way: deque[Answer] = deque()

    def fill(self, output: Tensor, job: Callable[[], object], group: Any) -> None:
        """Let `job` fill the output: at once, or before backward returns, as FSDP2's param group allows.

        Raises what a job has raised, here or at the end of backward.
        """
        if output.device.type != "cpu":
            job()
            return
        answer = self._submit(job)
        if not may_wait(output, group):
            self._thread.wait(answer)
            return
        Variable._execution_engine.queue_callback(partial(self._thread.wait, answer))
        self._under_way.append(answer)
        if len(self._under_way) > UNDER_WAY:
            self._thread.wait(self._under_way.popleft())

    def finish(self, job: Callable[[], object]) -> None:
        """Do this last, and wait for it."""
        self._thread.wait(self._submit(job))

    def close(self) -> None:
        """End the thread when the jobs are done."""
        self._under_way.clear()
        self._thread.end()

    def _submit(self, job: Callable[[], object]) -> Answer:
        def done() -> Tensor:
            job()
            return torch.empty(0, dtype=torch.float32, device="cpu")

        return self._thread.submit(done)


def may_wait(output: Tensor, group: Any) -> bool:
    """Whether FSDP2 only makes views of this output in the present backward pass.

    It reads an output that it casts, divides, adds to an earlier gradient, offloads, or gives to hooks.
    """
    return (
        torch._C._current_graph_task_id() >= 0
        and output.dtype in (torch.float32, torch.bfloat16)
        and group.gradient_divide_factor is None
        and not getattr(group, "force_sum_reduction_for_comms", True)
        and not any(read_at_once(each, output.dtype) for each in group.fsdp_params)
    )


def read_at_once(parameter: Any, dtype: torch.dtype) -> bool:
    """Whether FSDP2 reads the values of this parameter's gradient, of this dtype, as soon as it has them."""
    shard = parameter.sharded_param
    if (
        getattr(parameter, "sharded_grad_dtype", parameter.orig_dtype) != dtype
    ):  # the former from torch 2.15 on
        return True
    hooks = getattr(shard, "_post_accumulate_grad_hooks", None)
    return bool(shard.grad is not None or parameter.offload_to_cpu or hooks)
