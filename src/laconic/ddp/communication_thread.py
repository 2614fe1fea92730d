"""Communication thread: runs jobs in the order in which they were submitted.

Collectives must start in one order on every rank, and a collective that waits inside a Future's callback
hangs on gloo with several buckets in flight. So every bucket is a job: the hook returns a Future at once,
backward goes on, and nothing ever blocks in a callback.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

Job: TypeAlias = Callable[[], Tensor]
Answer: TypeAlias = "torch.futures.Future[Tensor]"


class CommunicationThread:
    """A daemon thread with a queue. After a job has failed, later jobs fail with the same error without
    running.

    `device`: if it is a GPU, jobs run on a stream of their own, beside what the caller computes there.
    """

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self.error: BaseException | None = None
        self._name = name
        on_gpu = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._jobs: queue.SimpleQueue[tuple[Job, Answer] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, devices: list[int | str | torch.device] | None = None) -> Answer:
        """A Future of the job's tensor. `devices`: where the tensor is, unless on the CPU.

        On its own stream, a job starts after the work that the caller has queued on the device, and waiting
        for the Future waits for the job there.
        """
        if self._stream is not None:
            devices = [self._stream.device]
            job = partial(_after, torch.cuda.current_stream(self._stream.device).record_event(), job)
        answer: Answer = torch.futures.Future(devices=devices)
        self._jobs.put((job, answer))
        return answer

    def end(self) -> None:
        """End the thread when the queued jobs are done, without waiting for that."""
        self._jobs.put(None)

    def close(self) -> None:
        """Finish the queued jobs and end the thread."""
        self.end()
        self._thread.join()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            self._do(*item)
            del item  # so that the waiting thread keeps no model alive

    def _do(self, job: Job, answer: Answer) -> None:
        if self.error is None:
            try:
                with torch.cuda.stream(self._stream):  # None: the thread's current stream
                    answer.set_result(job())
            except BaseException as error:  # backward() on this rank must raise it, whatever it is
                self.error = error
                let_go(error)
        if self.error is not None:
            failure = RuntimeError(f"{self._name}: {type(self.error).__name__}: {self.error}")
            answer.set_exception(failure)  # type: ignore[arg-type]  # torch's own annotation is wrong


def _after(ready: torch.cuda.Event, job: Job) -> Tensor:
    """The job, once the GPU has reached this event."""
    torch.cuda.current_stream().wait_event(ready)
    return job()


def let_go(error: BaseException) -> None:
    """Drop what the frames of a kept error hold, such as process groups; its traceback stays."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
