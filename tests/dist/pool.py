"""A pool of worker processes that serves all distributed tests of one run.

`pool.run` calls a function on ranks that stay for the next test, `pool.each` does so for many cases in one
job, and `pool.fresh` on ranks that may die. The body of a test decorated with `on_ranks` runs on ranks.

Importing torch takes seconds a process, so workers are forked from the launcher's server, which has imported
it, stay alive between tests and join a new process group for each job. The store lives in the test process. A
job that hangs or dies takes the workers of the pool with it, by process id, and the next job starts new ones.
A rank that is not to die counts as dead late: on a busy machine a process may stand still for seconds.
A worker is replaced too if threads of gloo are left in it, which would use the processor until its end.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from laconic.strategies.membership.heartbeats import Heartbeats
from laconic.tools.tasks.launcher import prepare_to_launch

GRACE_S = 10.0  # for the others, once one rank has failed
STACKS_S = 10.0  # until a late rank has written where it is
JOB_S, CASE_S = 120.0, 30.0  # a job may take this long, and its further cases: the machine may be busy
CONNECT_S = 120.0  # all ranks have to be connected by then, before the time of a job begins
POLL_S = 0.1  # between two checks whether they are
DEAD_S = {False: 20.0, True: 3.0}  # whether ranks may die: seconds without a heartbeat

CONNECTED = "all connected"  # the key in a job's store

Job = Callable[..., Any] | str


class RemoteError(Exception):
    """The traceback of a rank, or what is known of a rank that died."""


class HungError(RemoteError):
    """A rank was not done in time."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: its value, or its error and when that was; an exit code if its process is gone."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    when: float = float("inf")
    exit_code: int | None = None


def errors_of(outcomes: Iterable[Outcome]) -> str:
    """Return the whole error of each rank, for the message of an assertion: pytest shortens a list."""
    return "\n".join(f"rank {each.rank}: {each.error!s}" for each in outcomes)


class Pool:
    """Workers on the loopback interface, with gloo and one thread each."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        self._jobs = 0

    def run(self, size: int, function: Job, *args: Any, timeout_s: float = JOB_S) -> list[Any]:
        """function(*args) on `size` ranks of a new default process group; the results in rank order.

        The time limit begins when all ranks are connected, as connecting may take seconds on a busy machine.
        `function` is defined at the top of a module, or named "module:function". The first error of a rank is
        raised again, its message led by the rank; its traceback there is its cause.
        """
        for worker in [each for each in self._workers if each.left_groups]:
            worker.kill()
            self._workers.remove(worker)
        while len(self._workers) < size:
            self._workers.append(_Worker())
        workers = self._workers[:size]
        try:
            outcomes = self._play(workers, function, args, timeout_s, grace_s=GRACE_S)
        except BaseException:
            self.close()  # they may still be at work
            raise
        if any(each.exit_code is not None or isinstance(each.error, HungError) for each in outcomes):
            self.close()
        first = min(outcomes, key=lambda each: each.when)  # later errors may be its consequences
        if first.error is not None:
            raise first.error
        return [each.value for each in outcomes]

    def each(
        self, size: int, function: Job, cases: Iterable[Any], *args: Any, timeout_s: float | None = None
    ) -> Iterator[tuple[Any, list[Any]]]:
        """Each case and the results of function(*case, *args) in rank order; all cases are one job.

        A case is a tuple of arguments or one argument. The message of an error names the case.
        """
        cases = list(cases)
        timeout_s = timeout_s or JOB_S + CASE_S * len(cases)
        found = self.run(size, _each, _address(function), cases, args, timeout_s=timeout_s)
        return zip(cases, map(list, zip(*found, strict=True)), strict=True)

    def fresh(
        self, size: int, function: Job, *args: Any, timeout_s: float = 60.0, revive: bool = False
    ) -> list[Outcome]:
        """function(*args) in new processes that end with it and may die: each rank's outcome, none raised.

        `revive`: the first that dies is started anew, once, and does the same.
        """
        workers = [_Worker(may_die=True) for _ in range(size)]
        try:
            return self._play(workers, function, args, timeout_s, grace_s=timeout_s, revive=revive)
        finally:
            for worker in workers:
                worker.kill()

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _play(
        self,
        workers: list[_Worker],
        function: Job,
        args: tuple[Any, ...],
        timeout_s: float,
        grace_s: float,
        revive: bool = False,
    ) -> list[Outcome]:
        self._jobs += 1
        job = (
            f"job{self._jobs}",
            self._store.port,
            len(workers),
            timeout_s,
            _address(function),
            pickle.dumps(args),
        )
        outcomes: dict[int, Outcome] = {}
        running = dict(enumerate(workers))
        for rank, worker in running.items():
            worker.connection.send_bytes(pickle.dumps((rank, *job)))
        store, connected = dist.PrefixStore(job[0], self._store), False
        deadline = time.monotonic() + CONNECT_S
        while running:
            connections = [worker.connection for worker in running.values()]
            left_s = max(0.0, deadline - time.monotonic())
            ready = wait(connections, left_s if connected else min(left_s, POLL_S))
            if not connected and store.check([CONNECTED]):
                connected, deadline = True, time.monotonic() + timeout_s
            if not ready and time.monotonic() >= deadline:
                late = f"done after {timeout_s} s" if connected else f"connected after {CONNECT_S} s"
                return [outcomes.get(rank) or worker.hung(rank, late) for rank, worker in enumerate(workers)]
            for rank in [rank for rank, worker in running.items() if worker.connection in ready]:
                outcomes[rank] = running.pop(rank).outcome(rank)
                if revive and outcomes[rank].exit_code is not None:
                    revive, workers[rank] = False, _Worker(may_die=True)
                    running[rank] = workers[rank]
                    workers[rank].connection.send_bytes(pickle.dumps((rank, *job)))
                    deadline = time.monotonic() + timeout_s  # the new process has to start first
                    continue
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + grace_s)
        return [outcomes[rank] for rank in range(len(workers))]


def on_ranks(
    size: int | tuple[int, ...], cases: Iterable[Any] = ((),), timeout_s: float | None = None
) -> Callable[[Callable[..., None]], Callable[[Pool], None]]:
    """A test whose body runs on each rank of groups of `size`, once for each case, all in one job a group.

    The body asserts by itself; what fails names its rank and its case.
    """

    def decorate(body: Callable[..., None]) -> Callable[[Pool], None]:
        def test(pool: Pool) -> None:
            address = body.__module__, sys.modules[body.__module__].__file__, body.__name__
            for ranks in size if isinstance(size, tuple) else (size,):
                limit_s = timeout_s or JOB_S + CASE_S * len(listed)
                pool.run(ranks, _each, address, listed, (), timeout_s=limit_s)

        listed = list(cases)
        assert listed, "without a case the test cannot fail"
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, name, getattr(body, name))
        test.body = body  # type: ignore[attr-defined]  # for `_find`, in the workers
        return test

    return decorate


def _each(address: tuple[str, str | None, str], cases: list[Any], args: tuple[Any, ...]) -> list[Any]:
    """The results of a function for all cases, on one rank."""
    function, results = _find(*address), []
    for case in cases:
        try:
            results.append(function(*(case if isinstance(case, tuple) else (case,)), *args))
        except Exception as error:
            if len(error.args) <= 1 and case != ():
                error.args = (f"case {case!r}: {error}",)
            raise
    return results


class _Worker:
    """One process and the connection to it."""

    def __init__(self, *, may_die: bool = False) -> None:
        prepare_to_launch()
        context = multiprocessing.get_context("forkserver")
        self.connection, there = context.Pipe()
        self.stacks = tempfile.NamedTemporaryFile(prefix="stacks-", mode="r")  # noqa: SIM115 - lives with the worker
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        self.process = context.Process(
            target=_serve, args=(there, self.stacks.name, environment, may_die), daemon=True
        )
        self.process.start()
        there.close()
        self.left_groups = False  # whether a job left groups or meshes behind, as FSDP2 in caches of torch

    def outcome(self, rank: int) -> Outcome:
        """What the worker reports, or its exit code if it is gone."""
        try:
            report, left_groups = pickle.loads(self.connection.recv_bytes())
            value, error, trace, when = pickle.loads(report)
            self.left_groups = bool(left_groups)
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            error = RemoteError(f"rank {rank} ended with exit code {code}")
            return Outcome(rank, error=error, when=0.0, exit_code=code)
        if error is not None:
            error.__cause__ = RemoteError(f"on rank {rank}:\n{trace}")
        return Outcome(rank, value, error, when)

    def hung(self, rank: int, late: str) -> Outcome:
        """The outcome of a rank that was `late` in some way, with the Python stacks of its threads."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        stacks, more, deadline = "", "", time.monotonic() + STACKS_S
        while (more or not stacks) and time.monotonic() < deadline:
            time.sleep(0.3)  # in which a rank with something left to write does so
            more = self.stacks.read()
            stacks += more
        return Outcome(
            rank,
            error=HungError(f"rank {rank} was not {late}; it is in\n{stacks}"),
            when=time.monotonic(),
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.stacks.close()


def _address(function: Job) -> tuple[str, str | None, str]:
    """Module name, its file where the name alone may not be enough, and the function's name."""
    if isinstance(function, str):
        module, _, name = function.partition(":")
        return module, None, name
    if function.__qualname__ != function.__name__:
        raise ValueError(f"a worker calls functions from the top of a module, got {function.__qualname__}")
    return function.__module__, sys.modules[function.__module__].__file__, function.__name__


def _find(module: str, file: str | None, name: str) -> Callable[..., Any]:
    """The other side of `_address`."""
    if module not in sys.modules and file is not None:
        spec = importlib.util.spec_from_file_location(module, Path(file))
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded
        try:
            spec.loader.exec_module(loaded)
        except BaseException:
            del sys.modules[module]  # the next job shall see the error too
            raise
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return getattr(function, "body", function)


def _work(rank: int, prefix: str, port: int, size: int, timeout_s: float, address: Any, args: bytes) -> bytes:
    """Do one job; the report is (value, error, traceback, time of the error)."""
    timeout = timedelta(seconds=max(timeout_s, CONNECT_S))  # the pool itself ends a job that takes too long
    store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout))
    dist.distributed_c10d._world.group_count = 0  # ranks that number their groups apart never meet
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function = _find(*address)  # its module may take seconds to import, which is not the job's time
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
            wait_for_all(store, size, timeout)
            return pickle.dumps((function(*pickle.loads(args)), None, "", float("inf")))
    except BaseException as error:
        when, trace = time.monotonic(), traceback.format_exc()
        if len(error.args) <= 1 and not str(error).startswith(f"rank {rank}"):
            error.args = (f"rank {rank}: {error}",)
        try:
            report = pickle.dumps((None, error, trace, when))
            pickle.loads(report)
        except Exception:
            plain = RemoteError(f"rank {rank}: {type(error).__name__}: {error}")
            report = pickle.dumps((None, plain, trace, when))
        return report
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def wait_for_all(store: dist.Store, size: int, timeout: timedelta) -> None:
    """Wait until all ranks are connected: gloo fails in a rank whose peer leaves before that."""
    if store.add("connected", 1) == size:
        store.set(CONNECTED, "")
    store.wait([CONNECTED], timeout)


def _serve(connection: Connection, stacks: str, environment: dict[str, str], may_die: bool) -> None:
    """Do jobs until the other end closes."""
    os.environ.update(environment)
    Heartbeats.dead_after_s = DEAD_S[may_die]
    with Path(stacks).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        torch.set_num_threads(1)
        gc.freeze()  # a collection then looks at the objects of jobs alone
        while True:
            try:
                rank, *job = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            report = _work(rank, *job)
            gc.collect()
            connection.send_bytes(pickle.dumps((report, _gloo_threads() > 0 or _holds_meshes())))


def _holds_meshes() -> bool:
    """Return whether torch caches results of DTensor. Before 2.10 equal meshes of later jobs get them."""
    api = sys.modules.get("torch.distributed.tensor._api")
    if api is None:
        return False
    cached = api.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache
    return bool(cached.cache_info().currsize)


def _gloo_threads() -> int:
    """Count the threads of groups that are left, each of which wakes up a hundred times a second."""
    count = 0
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that has just ended
            count += "gloo" in file.read_text()
    return count
