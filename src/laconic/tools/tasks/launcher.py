"""Starts the workers of one training on this machine, receives their events, and stops them together.

Workers are forked from a server that has imported torch, and end if the launcher dies.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch marks no re-export

from laconic.core.errors import LaconicError, PeerError
from laconic.exchange.agreement import QUOTES
from laconic.strategies.distribute import strategy_or_method
from laconic.tools.tasks.blockwise import is_blockwise, train_blocks
from laconic.tools.tasks.place import Hosts
from laconic.tools.tasks.settings import Emit, Event, TrainingSettings
from laconic.tools.tasks.training import train_rank

TIMEOUT = timedelta(seconds=120)
# an optimiser imports torch._dynamo, which takes seconds
PRELOADED = ["__main__", "laconic.tools.tasks.fork_server", "laconic.tools.tasks.pipelined", "torch._dynamo"]
LEAVE_S = 30.0  # for other workers to finish
GRACE_S = 1.0  # for the peers' errors: the earliest is the cause
QUOTED_S = 10.0


class WorkerFailed(PeerError):
    """A worker ended with an error.

    `expected`: a `LaconicError`; `details`: else the traceback, empty if it was killed; `error`: class name.
    """

    def __init__(self, message: str, details: str = "", expected: bool = False, error: str = "") -> None:
        super().__init__(message)
        self.details = details
        self.expected = expected
        self.error = error

    def within(self, where: str) -> WorkerFailed:
        return WorkerFailed(f"{where}: {self}", self.details, self.expected, self.error)


def launch(settings: TrainingSettings) -> Generator[Event, None, None]:
    """Run a training on `settings.workers` processes, and yield their events.

    The workers end with the iteration.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    prepare_to_launch()
    workers = Workers(settings, store.port)
    try:
        for rank in range(settings.workers):
            workers.start(rank)
        survives_loss = settings.patience is not None and (
            settings.patience_of(strategy_or_method(settings.spec)) is not None
        )
        yield from _listen(workers, survives_loss, settings.restarts if survives_loss else 0)
    finally:
        workers.end()


class Workers:
    def __init__(self, settings: TrainingSettings, port: int) -> None:
        self.pipes: dict[Connection, int] = {}
        self.present: dict[int, BaseProcess] = {}
        self.restarted: set[int] = set()
        self._settings, self._port = settings, port
        self._context = multiprocessing.get_context("forkserver")

    def start(self, rank: int) -> Connection:
        if before := self.present.get(rank):
            before.join()
            self.restarted.add(rank)
        ours, theirs = self._context.Pipe(duplex=False)
        process: BaseProcess = self._context.Process(
            target=work, args=(self._settings, rank, self._port, theirs), daemon=True
        )
        process.start()
        theirs.close()
        self.present[rank] = process
        self.pipes[ours] = rank
        return ours

    def end(self) -> None:
        for process in self.present.values():
            process.kill()
        for process in self.present.values():
            process.join()
        for pipe in self.pipes:
            pipe.close()


def prepare_to_launch() -> None:
    """Start the server that forks workers; it imports torch in the background.

    Ctrl-C, which would print a traceback, is blocked until it has imported `fork_server`.
    """
    forkserver.set_forkserver_preload(PRELOADED)
    resource_tracker.ensure_running()  # else the server starts it, which unblocks signals
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the server
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _listen(workers: Workers, survives_loss: bool = False, restarts: int = 0) -> Iterator[Event]:
    """Yield the workers' events until all have ended.

    `survives_loss`: training continues without lost workers. `restarts`: how many may be restarted.
    """
    pipes = workers.pipes
    open_pipes = set(pipes)
    steps = dict.fromkeys(workers.present, 0)
    failures: list[Event] = []
    finished: set[int] = set()
    deadline: float | None = None
    while open_pipes and (deadline is None or time.monotonic() < deadline):
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        for pipe in wait(list(open_pipes), left):
            assert isinstance(pipe, Connection)
            if pipe not in open_pipes:  # closed by another worker's last event
                continue
            rank = pipes[pipe]
            try:
                event: Event = pipe.recv() | {"rank": rank}
            except (EOFError, OSError):
                open_pipes.remove(pipe)
                if rank in finished:
                    continue
                death = _silent_death(rank, workers.present[rank])
                if survives_loss and open_pipes:
                    yield {"kind": "lost", "rank": rank, "step": steps[rank], "message": death["message"]}
                    if restarts and not finished:
                        restarts -= 1
                        open_pipes.add(workers.start(rank))
                else:
                    failures.append(death)
            else:
                steps[rank] = event.get("step", steps[rank])
                if event["kind"] == "done":
                    finished.add(rank)
                    for gone in {pipe for pipe in open_pipes if pipes[pipe] not in event["living"]}:
                        open_pipes.remove(gone)
                        lost = pipes[gone]
                        message = f"rank {lost}: the worker does not respond"
                        yield {"kind": "lost", "rank": lost, "step": steps[lost], "message": message}
                elif event["kind"] == "error":
                    finished.add(rank)
                    late = rank in workers.restarted and event["error"] == PeerError.__name__
                    if late and finished - {rank}:  # returned after the others
                        yield {"kind": "lost", "rank": rank, "step": steps[rank], "message": event["message"]}
                    else:
                        failures.append(event)
                else:
                    yield event
        if failures and deadline is None:
            quotes = any(QUOTES in str(each["message"]) for each in failures)
            deadline = time.monotonic() + (QUOTED_S if quotes else GRACE_S)
    if failures:
        raise _failed(_cause(failures))


def _cause(failures: list[Event]) -> Event:
    first = min(failures, key=lambda event: event["at"])
    faults = (other for other in failures if other["details"] and other["message"])
    return next((fault for fault in faults if fault["message"] in first["message"]), first)


def _failed(cause: Event) -> WorkerFailed:
    where = f"rank {cause['rank']}: "
    message = str(cause["message"]).removeprefix(where)
    if cause["details"]:
        message = f"{cause['error']}: {message}"
    return WorkerFailed(where + message, cause["details"], cause["expected"], cause["error"])


def _silent_death(rank: int, process: BaseProcess) -> Event:
    process.join()
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    # "at" 0: the cause, even if its consequences were reported earlier
    message = f"rank {rank}: the worker {how}"
    return {"rank": rank, "at": 0.0, "error": "", "message": message, "details": "", "expected": False}


def _trained(settings: TrainingSettings, emit: Emit) -> list[int]:
    if settings.pipeline is None:
        return (train_blocks if is_blockwise(settings.spec) else train_rank)(settings, emit)
    from laconic.tools.tasks.pipelined import train_stage  # a slow import

    return train_stage(settings, emit)


def _leave_together(store: TCPStore, rank: int, living: list[int]) -> None:
    """Wait until no worker needs this one: a lost worker breaks the group."""
    store.set(f"done/{rank}", "")
    with contextlib.suppress(RuntimeError):
        store.wait([f"done/{other}" for other in living], timedelta(seconds=LEAVE_S))


def _error_event(error: Exception) -> Event:
    expected = isinstance(error, LaconicError)
    return {
        "kind": "error",
        "at": time.monotonic(),
        "error": type(error).__name__,
        "message": str(error),
        "details": "" if expected else "".join(traceback.format_exception(error)),
        "expected": expected,
    }


def _end_with_launcher() -> None:
    if launcher := multiprocessing.parent_process():
        launcher.join()
        os._exit(1)


def work(settings: TrainingSettings, rank: int, port: int, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends workers
    threading.Thread(target=_end_with_launcher, name="laconic-launcher", daemon=True).start()
    torch.set_num_threads(settings.threads)
    hosts = Hosts.here()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", hosts.interface)
    if settings.restarts:  # pairs connect lazily: a restarted worker is reachable
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    os.environ.update(hosts.environment(rank, settings.workers))
    try:
        hosts.enter(rank, settings.workers)
        before = hosts.counted(rank, settings.workers)
        store = TCPStore(hosts.addresses[0], port, timeout=TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.workers, timeout=TIMEOUT)
        living = _trained(settings, pipe.send)
        if before and (after := hosts.counted(rank, settings.workers)):
            sent, received = (end - start for start, end in zip(before, after, strict=True))
            pipe.send({"kind": "interface", "step": settings.steps, "sent": sent, "received": received})
        _leave_together(store, rank, living)
        pipe.send({"kind": "done", "living": living})
    except Exception as error:
        pipe.send(_error_event(error))
    finally:
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # clean-up could wait for a peer
