"""The thread that exchanges buckets: what is left of a job that fails."""

from __future__ import annotations

import gc
import sys
import traceback
import weakref

import pytest
import torch
from tests.unit.shared import refuses

from laconic.comm.communication_thread import CommunicationThread


class Group:
    """Stands for a process group: its peers wait until it is gone."""

    def fail(self) -> torch.Tensor:
        def end() -> torch.Tensor:
            raise ZeroDivisionError(f"of {self}")

        return end()


def test_a_failed_job_is_let_go_at_once_and_needs_no_garbage_collector() -> None:
    gc.disable()
    try:
        thread, group = CommunicationThread("test"), Group()
        gone = weakref.ref(group)
        answer = thread.submit(group.fail)
        refuses(RuntimeError, "test: ZeroDivisionError", answer.wait)
        thread.close()
        del group
        assert gone() is None
        told = "".join(traceback.format_exception(thread.error))
        assert "in fail" in told or sys.version_info < (3, 11)
    finally:
        gc.enable()


def test_held_answers_come_with_the_next_that_is_not_held_or_with_its_failure() -> None:
    for fails in (False, True):
        thread, tensors = CommunicationThread("test"), [torch.zeros(1) for _ in range(3)]

        def last(fails: bool = fails, tensors: list[torch.Tensor] = tensors) -> torch.Tensor:
            if fails:
                raise ZeroDivisionError("the last")
            for tensor in tensors:
                tensor.fill_(1.0)  # what the others wait for
            return tensors[-1]

        held = [thread.submit(lambda tensor=tensor: tensor, hold=True) for tensor in tensors[:-1]]
        thread.submit(lambda: torch.zeros(1), hold=True)
        answers = [*held, thread.submit(last)]
        for answer, tensor in zip(answers, tensors, strict=True):
            if fails:
                with pytest.raises(RuntimeError, match="the last"):
                    answer.wait()
            else:
                assert answer.wait() is tensor and bool(tensor)
        thread.close()
