"""Communication thread: runs jobs in the order of submission.

Collectives must start in one order on every rank, and one that waits inside a Future's callback hangs on
gloo with several buckets in flight.
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
    """Daemon thread with a queue. It ends with this object, or with Python.

    After a job has failed, later jobs fail with the same error. On a GPU `device`, jobs run on a separate
    stream.
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
        return self._queue.error

    def submit(self, job: Job, device: torch.device | None = None, *, hold: bool = False) -> Answer:
        """Queue a job and return a Future of its tensor. `device`: the tensor's; default: this object's.

        `hold`: complete the Future only after the next job without `hold`, which may still write the
        tensor; only on a CPU. On a GPU a job starts after the work that the caller has queued, and waiting
        for the Future makes the then current stream wait.
        """
        stream = self._stream_on(device or self._device)
        if stream is not None:
            job = partial(_after, stream, torch.cuda.current_stream(stream.device).record_event(), job)
        answer: Answer = torch.futures.Future(devices=None if stream is None else [stream.device])
        self._queue.jobs.put((job, answer, stream, hold))
        return answer

    def _stream_on(self, device: torch.device | None) -> torch.cuda.Stream | None:
        if device is None or device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def wait(self, answer: Answer) -> None:
        """Wait for a job. Raises its error or an earlier one."""
        with suppress(RuntimeError):
            answer.wait()
        if isinstance(self.error, LaconicError):
            raise self.error
        if self.error is not None:
            raise RuntimeError(f"{self.name}: {type(self.error).__name__}: {self.error}") from self.error

    def end(self, last: Last = None) -> None:
        """End the thread after the queued jobs and `last`."""
        self._queue.end(last)

    def close(self) -> None:
        self.end()
        self._thread.join()


class _Queue:
    def __init__(self, name: str) -> None:
        self.error: BaseException | None = None
        self.jobs: queue.SimpleQueue[tuple[Job, Answer, torch.cuda.Stream | None, bool] | Last] = (
            queue.SimpleQueue()
        )
        self._held: list[tuple[Answer, Tensor]] = []
        self._name = name
        self._current: torch.cuda.Stream | None = None

    def end(self, last: Last = None) -> None:
        self.jobs.put(last)

    def run(self) -> None:
        while isinstance(item := self.jobs.get(), tuple):
            self._do(*item)
            del item  # otherwise the waiting thread keeps a model alive
        if item is not None:
            item()

    def _do(self, job: Job, answer: Answer, stream: torch.cuda.Stream | None, hold: bool) -> None:
        if self.error is None:
            try:
                if stream is not None and stream is not self._current:
                    torch.cuda.set_device(stream.device)  # a thread starts with the first GPU
                    torch.cuda.set_stream(stream)  # a `with` block would cost each job 20 us
                    self._current = stream
                self._held.append((answer, job()))
                if not hold:
                    self._complete()
            except BaseException as error:  # backward() must raise any error
                self.error = error
                drop_traceback(error)
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
    stream.wait_event(ready)
    return job()


def drop_traceback(error: BaseException) -> None:
    """Replace the traceback of a stored error by a note (Python 3.11).

    Frames hold process groups, and peers wait in a group until it is freed. Clearing the frames is not
    enough: they reference their closures.
    """
    if hasattr(error, "add_note"):
        error.add_note("".join(traceback.format_exception(error)).rstrip())
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
