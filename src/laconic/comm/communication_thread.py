"""Communication thread: runs jobs in the order in which they were submitted.

Collectives must start in one order on every rank, and a collective that waits inside a Future's callback
hangs on gloo with several buckets in flight. So every bucket is a job: the hook returns a Future at once,
backward goes on, and nothing ever blocks in a callback.
"""

from __future__ import annotations

import queue
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from laconic.comm.at_exit import start_thread
from laconic.core.errors import LaconicError

Job: TypeAlias = Callable[[], Tensor]
Answer: TypeAlias = "torch.futures.Future[Tensor]"
Last: TypeAlias = Callable[[], object] | None


class CommunicationThread:
    """A daemon thread with a queue. After a job has failed, later jobs fail with the same error without
    running. The thread ends with this object, or with Python.

    `device`: if it is a GPU, jobs run on a stream of their own, beside what the caller computes there, with
    that GPU as the thread's current device. A job can also name its device when it is submitted.
    """

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self.name = name
        self._device = device
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._queue = _Queue(name)
        self._thread = start_thread(self._queue.run, name, end=self._queue.end)
        weakref.finalize(self, self._queue.end).atexit = False

    @property
    def error(self) -> BaseException | None:
        """Why jobs fail; None while all is well."""
        return self._queue.error

    def submit(self, job: Job, device: torch.device | None = None, *, hold: bool = False) -> Answer:
        """A Future of the job's tensor. `device`: where the tensor is, by default that of this object.

        `hold`: the Future is completed only when the next job without `hold` is done, which may still write
        the tensor: on a CPU.

        On a GPU a job starts after the work that the caller has queued there, and waiting for the Future
        makes the stream that is current then wait for the job.
        """
        stream = self._stream_on(device or self._device)
        if stream is not None:
            job = partial(_after, stream, torch.cuda.current_stream(stream.device).record_event(), job)
        answer: Answer = torch.futures.Future(devices=None if stream is None else [stream.device])
        self._queue.jobs.put((job, answer, stream, hold))
        return answer

    def _stream_on(self, device: torch.device | None) -> torch.cuda.Stream | None:
        """This object's stream on a GPU; None for another device."""
        if device is None or device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def wait(self, answer: Answer) -> None:
        """Wait for a job. Raises why it, or one before it, could not be done."""
        with suppress(RuntimeError):
            answer.wait()
        if isinstance(self.error, LaconicError):
            raise self.error
        if self.error is not None:
            raise RuntimeError(f"{self.name}: {type(self.error).__name__}: {self.error}") from self.error

    def end(self, last: Last = None) -> None:
        """End the thread when the queued jobs are done, without waiting for that. It calls `last` then."""
        self._queue.end(last)

    def close(self) -> None:
        """Finish the queued jobs and end the thread."""
        self.end()
        self._thread.join()


class _Queue:
    """What the thread itself refers to: the jobs, and why they fail."""

    def __init__(self, name: str) -> None:
        self.error: BaseException | None = None
        self.jobs: queue.SimpleQueue[tuple[Job, Answer, torch.cuda.Stream | None, bool] | Last] = (
            queue.SimpleQueue()
        )
        self._held: list[tuple[Answer, Tensor]] = []
        self._name = name
        self._current: torch.cuda.Stream | None = None  # of the thread

    def end(self, last: Last = None) -> None:
        """End the thread when the queued jobs are done; it calls `last` then."""
        self.jobs.put(last)

    def run(self) -> None:
        """Do one job after the other, until the end."""
        while isinstance(item := self.jobs.get(), tuple):
            self._do(*item)
            del item  # so that the waiting thread keeps no model alive
        if item is not None:
            item()

    def _do(self, job: Job, answer: Answer, stream: torch.cuda.Stream | None, hold: bool) -> None:
        if self.error is None:
            try:
                if stream is not None and stream is not self._current:
                    torch.cuda.set_device(stream.device)  # that of a new thread is the first GPU
                    torch.cuda.set_stream(stream)  # for good: a `with` block would cost each job 20 us
                    self._current = stream
                self._held.append((answer, job()))
                if not hold:
                    self._complete()
            except BaseException as error:  # backward() on this rank must raise it, whatever it is
                self.error = error
                let_go(error)
        if self.error is not None:
            failure = RuntimeError(f"{self._name}: {type(self.error).__name__}: {self.error}")
            for each in (*(held for held, _ in self._held), answer):
                each.set_exception(failure)  # type: ignore[arg-type]  # torch's own annotation is wrong
            self._held.clear()

    def _complete(self) -> None:
        held, self._held = self._held, []
        for answer, tensor in held:
            answer.set_result(tensor)


def _after(stream: torch.cuda.Stream, ready: torch.cuda.Event, job: Job) -> Tensor:
    """The job, once the GPU has reached this event; `stream` is current."""
    stream.wait_event(ready)
    return job()


def let_go(error: BaseException) -> None:
    """Make the traceback of a kept error a note of it (Python 3.11), so that it keeps no frame.

    Frames hold process groups, and peers wait in a group until it is gone. Cleared frames are not enough:
    they keep their functions, and these what they close over.
    """
    if hasattr(error, "add_note"):
        error.add_note("".join(traceback.format_exception(error)).rstrip())
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
