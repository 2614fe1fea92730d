"""Start one training's workers on this machine, listen to all of them, and end them all at once.

Workers are forked from a clean server process that has imported torch once: a start costs a fraction of a
second. They meet over gloo on the loopback interface, in a store that the launcher holds. Each worker talks
to the launcher through a pipe of its own; when the launcher dies, the pipe breaks and the worker ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Generator, Iterator
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public; torch marks no re-export

from laconic.core.errors import LaconicError, PeerError
from laconic.strategies.distribute import strategy_or_method
from laconic.tasks.place import Hosts
from laconic.tasks.plan import Event, Plan
from laconic.tasks.training import train_rank

TIMEOUT = timedelta(seconds=120)  # of a collective: a worker that hangs that long fails the run
# imported once for all workers; an optimiser imports torch._dynamo when it is made, which takes seconds
PRELOADED = ["__main__", "laconic.tasks.training", "torch._dynamo"]
LEAVE_S = 30.0  # that a worker waits at the end for others that were alive
GRACE_S = 1.0  # after a failure: peers report theirs too, and the earliest one is the cause


class WorkerFailed(PeerError):
    """A worker ended with an error. `expected`: it was a LaconicError, whose message says all; else `details`
    is the worker's traceback, or nothing where the worker was killed. `error`: the name of its class.
    """

    def __init__(self, message: str, details: str = "", expected: bool = False, error: str = "") -> None:
        super().__init__(message)
        self.details = details
        self.expected = expected
        self.error = error

    def within(self, where: str) -> WorkerFailed:
        """The same failure, told with where it happened."""
        return WorkerFailed(f"{where}: {self}", self.details, self.expected, self.error)


def launch(plan: Plan) -> Generator[Event, None, None]:
    """Run a plan on `plan.workers` processes, and yield their events, each with its rank.

    However the iteration ends (at the end, by an error, by Ctrl-C, by closing the generator), no worker is
    left.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    prepare_to_launch()
    workers = Workers(plan, store.port)
    try:
        for rank in range(plan.workers):
            workers.start(rank)
        outlasts = plan.patience_of(strategy_or_method(plan.spec)) is not None
        yield from _listen(workers, outlasts, plan.restarts if outlasts else 0)
    finally:
        workers.end()


class Workers:
    """The processes of one training, and their pipes. A rank's process may be started anew."""

    def __init__(self, plan: Plan, port: int) -> None:
        self.pipes: dict[Connection, int] = {}  # of all that were ever started
        self.present: dict[int, BaseProcess] = {}
        self.restarted: set[int] = set()
        self._plan, self._port = plan, port
        self._context = multiprocessing.get_context("forkserver")

    def start(self, rank: int) -> Connection:
        """A process for this rank, the first or another; the end of its pipe."""
        if before := self.present.get(rank):
            before.join()
            self.restarted.add(rank)
        ours, theirs = self._context.Pipe(duplex=False)
        process: BaseProcess = self._context.Process(
            target=work, args=(self._plan, rank, self._port, theirs), daemon=True
        )
        process.start()
        theirs.close()
        self.present[rank] = process
        self.pipes[ours] = rank
        return ours

    def end(self) -> None:
        """End all that still run."""
        for process in self.present.values():
            process.kill()
        for process in self.present.values():
            process.join()
        for pipe in self.pipes:
            pipe.close()


def prepare_to_launch() -> None:
    """Start the server process that forks workers; it imports while the caller does other things."""
    forkserver.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def _listen(workers: Workers, outlasts: bool = False, restarts: int = 0) -> Iterator[Event]:
    """What workers say, until all have ended. `outlasts`: the training survives the loss of some of them, of
    which so many are started anew.
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
            if pipe not in open_pipes:  # another's last word, just now: this one is not waited for
                continue
            rank = pipes[pipe]
            try:
                event: Event = pipe.recv() | {"rank": rank}
            except (EOFError, OSError):
                open_pipes.remove(pipe)
                if rank in finished:
                    continue
                death = _silent_death(rank, workers.present[rank])
                if outlasts and open_pipes:
                    yield {"kind": "lost", "rank": rank, "step": steps[rank], "said": death["said"]}
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
                        said = f"rank {lost}: the worker stands still"
                        yield {"kind": "lost", "rank": lost, "step": steps[lost], "said": said}
                elif event["kind"] == "error":
                    finished.add(rank)
                    late = rank in workers.restarted and event["error"] == PeerError.__name__
                    if late and finished - {rank}:  # it has come when the others were done
                        yield {"kind": "lost", "rank": rank, "step": steps[rank], "said": event["said"]}
                    else:
                        failures.append(event)
                else:
                    yield event
        if failures and deadline is None:
            deadline = time.monotonic() + GRACE_S
    if failures:
        raise _failed(_cause(failures))


def _cause(failures: list[Event]) -> Event:
    """The earliest failure, or the fault that it quotes: who is told of another's may be the first to end."""
    first = min(failures, key=lambda event: event["at"])
    quoted = (other for other in failures if other["details"] and other["said"])
    return next((other for other in quoted if other["said"] in first["said"]), first)


def _failed(cause: Event) -> WorkerFailed:
    """What the launcher raises: an expected error needs no more than its own words, and their rank."""
    where = f"rank {cause['rank']}: "
    said = where + str(cause["said"]).removeprefix(where) if cause["expected"] else cause["message"]
    return WorkerFailed(said, cause["details"], cause["expected"], cause["error"])


def _silent_death(rank: int, process: BaseProcess) -> Event:
    process.join()
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    # others say what they died of, which may well be this death: so this is the cause
    message = f"rank {rank}: the worker {how}"
    event = {"rank": rank, "at": 0.0, "error": "", "said": message, "message": message}
    return event | {"details": "", "expected": False}


def _leave_together(store: TCPStore, rank: int, living: list[int]) -> None:
    """Nobody leaves while another still talks to it. By the store, as groups break with the lost."""
    store.set(f"done/{rank}", "")
    with contextlib.suppress(RuntimeError):  # one of them was lost in the end
        store.wait([f"done/{other}" for other in living], timedelta(seconds=LEAVE_S))


def _told(rank: int, error: Exception) -> Event:
    """What a worker says of the error that ends it."""
    expected, name = isinstance(error, LaconicError), type(error).__name__
    return {
        "kind": "error",
        "at": time.monotonic(),
        "error": name,
        "said": str(error),
        "message": f"rank {rank}: {name}: {error}",
        "details": "" if expected else "".join(traceback.format_exception(error)),
        "expected": expected,
    }


def work(plan: Plan, rank: int, port: int, pipe: Connection) -> None:
    """The body of one worker process."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes; the launcher ends the workers
    torch.set_num_threads(plan.threads)
    hosts = Hosts.here()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", hosts.interface)
    if plan.restarts:  # who comes later can be talked to, as pairs connect when they first talk
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    os.environ.update(hosts.environment(rank, plan.workers))
    try:
        hosts.enter(rank, plan.workers)
        before = hosts.counted(rank, plan.workers)
        store = TCPStore(hosts.addresses[0], port, timeout=TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.workers, timeout=TIMEOUT)
        living = train_rank(plan, pipe.send)
        if before and (after := hosts.counted(rank, plan.workers)):
            sent, received = (now - then for now, then in zip(after, before, strict=True))
            pipe.send({"kind": "interface", "step": plan.steps, "sent": sent, "received": received})
        _leave_together(store, rank, living)
        pipe.send({"kind": "done", "living": living})
    except Exception as error:
        pipe.send(_told(rank, error))
    finally:
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # no clean-up that could wait for a peer
