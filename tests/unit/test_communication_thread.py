"""The thread that exchanges buckets: what is left of a job that fails."""

from __future__ import annotations

import gc
import sys
import traceback
import weakref

import torch
from tests.unit.shared import refuses

from laconic.ddp.communication_thread import CommunicationThread


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
