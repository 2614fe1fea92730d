"""Joint calls: calls that every rank of a group makes between steps, such as `state_dict(gather=True)`.

If one rank alone makes such a call, its messages must not meet those of an exchange that the others have
begun. So the ranks of a joint call first meet in a process group of their own:

1. Each rank gathers the names of all ranks' calls. If they differ, every rank raises.
2. A rank that has waited for `REPORT_S` writes to the store what it waits in: a joint call, or an exchange.
3. A rank that waits in a joint call reads these reports. If another rank has begun a later exchange without
   having made this call, it never will: this rank closes its groups, which wakes the other, and both raise.

A rank that is only slow has reported no exchange, and is waited for until the timeout of the process group.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import NoReturn, TypeAlias

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch marks no re-export

from laconic.comm import waiting
from laconic.comm.at_exit import start_thread
from laconic.comm.gather_text import gather_text
from laconic.comm.naming import in_store
from laconic.comm.torch_comm import TorchComm
from laconic.comm.waiting import waiting_message
from laconic.core.errors import PeerError

Exchanging: TypeAlias = Callable[[str], AbstractContextManager[None]]  # marks an exchange of this name

ADVICE = (
    "every rank has to make this call, also one that writes no checkpoint and prints nothing: move it out of"
    " `if rank == 0:` or `if accelerator.is_main_process:`"
)
NEVER = 1 << 62  # exchanges of a rank that has ended
REPORT_S = 3.0  # of waiting, after which a rank reports; shorter waits cost no round trip to the store
POLL_S = 0.5

log = logging.getLogger("laconic")


@dataclass(frozen=True)
class Report:
    """State of a waiting rank: the call or exchange, and how many of each it has begun."""

    doing: str
    calls: int
    exchanges: int


def unwatched(name: str) -> AbstractContextManager[None]:
    """Mark nothing: an `Exchanging` for ranks without joint calls."""
    return nullcontext()


class JointCalls:
    """Joint calls of the ranks of `comm`. Created by all of them; holds a process group and a thread.

    Args:
        comm: The group whose exchanges are watched.
        others: Further groups of the same ranks. All are closed if a joint call fails.
    """

    def __init__(self, comm: TorchComm, *others: TorchComm) -> None:
        self._comms = comm, *others
        self._rank, self._size = comm.rank, comm.size
        self._calls = self._exchanges = 0
        self._exchange: tuple[int, str, float] | None = None  # number, name and start of the present one
        self._failure = ""
        self._closed = threading.Event()
        with ExitStack() as opened:  # closed if anything raises
            self._meeting = TorchComm.own(comm.group)
            opened.callback(self._meeting.close)
            store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
            prefix = f"{in_store(comm.group.group_name)}/calls"
            # a store serves one caller at a time, so the thread has its own; torch's type lacks `clone`
            self._store = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
            self._thread_store = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
            if self._size > 1:
                start_thread(self._watch, f"calls of rank {self._rank}", end=self._closed.set)
            opened.pop_all()

    def close(self) -> None:
        """End the thread and free the process group. Other ranks' joint calls fail from now on."""
        if not self._closed.is_set():
            self._closed.set()
            if not self._failure:  # otherwise other ranks may still look for the call that failed
                self._report(self._store, "remove() or the end of its process", NEVER)
        self._meeting.close()

    def make(self, call: str) -> None:
        """Wait until every rank makes this call; after `close` do nothing.

        Args:
            call: The name of the call, for errors.

        Raises:
            PeerError: On every rank: a rank made another call, began an exchange without making this one,
                or ended. The group cannot be used any more.
        """
        if self._failure:
            raise PeerError(self._failure)
        if self._closed.is_set():
            return
        self._calls += 1
        names: list[str] = []
        failures: list[Exception] = []
        done = threading.Event()

        def meet() -> None:
            try:
                names.extend(gather_text(self._meeting, call))
            except Exception as error:
                failures.append(error)
            done.set()

        # a thread, since nothing else can interrupt a wait for a rank that never comes
        start_thread(meet, f"{call} of rank {self._rank}", end=done.set)
        start, reported, logged = time.monotonic(), False, False
        while not done.wait(POLL_S):
            waited = time.monotonic() - start
            if waited >= REPORT_S and not reported:
                reported = True
                self._report(self._store, call, self._exchanges)
            if waited >= waiting.PATIENT_S and not logged:
                logged = True
                log.warning(waiting_message(self._rank, call))
            if reported and (elsewhere := self._elsewhere()):
                self._fail(f"rank {self._rank} is in {call}, and {elsewhere}")
        if failures:
            self._fail(f"rank {self._rank} is in {call}, and another rank ended or is late ({failures[0]})")
        if len(names) < self._size:
            raise PeerError(f"rank {self._rank}: {call} was interrupted by the end of Python")
        for rank, name in enumerate(names):
            if name != call:
                self._fail(f"rank {self._rank} is in {call}, and rank {rank} is in {name}")

    @contextmanager
    def exchange(self, name: str) -> Iterator[None]:
        """Mark an exchange, which all ranks begin in one order. A `PeerError` names the call behind it."""
        self._exchanges += 1
        self._exchange = self._exchanges, name, time.monotonic()
        try:
            yield
        except PeerError as error:
            if reason := self._missed_call():
                self._close_groups(f"rank {self._rank} is in {name}, and {reason}")
                raise PeerError(self._failure) from error
            raise
        finally:
            self._exchange = None

    def _watch(self) -> None:
        """Report an exchange that takes long."""
        reported = 0
        while not self._closed.wait(POLL_S):
            number, name, start = self._exchange or (0, "", 0.0)
            if number > reported and time.monotonic() - start >= REPORT_S:
                reported = number
                self._report(self._thread_store, name, number)

    def _report(self, store: Store, doing: str, exchanges: int) -> None:
        with suppress(RuntimeError):  # the store is gone: the process that holds it has ended
            store.set(str(self._rank), json.dumps(asdict(Report(doing, self._calls, exchanges))))

    def _reports(self) -> Iterator[tuple[int, Report]]:
        """Yield the other ranks that have reported, with their last reports."""
        with suppress(RuntimeError):
            for rank in range(self._size):
                if rank != self._rank and self._store.check([str(rank)]):
                    yield rank, Report(**json.loads(self._store.get(str(rank))))

    def _elsewhere(self) -> str:
        """Return which rank has begun a later exchange, or ended, without this call; "" if none is known."""
        for rank, report in self._reports():
            if report.calls < self._calls and report.exchanges > self._exchanges:
                return f"rank {rank} went on to {report.doing}"
        return ""

    def _missed_call(self) -> str:
        """Return which rank makes a call that this rank did not make before this exchange; "" if none."""
        for rank, report in self._reports():
            if report.calls > self._calls and report.exchanges < self._exchanges:
                return f"rank {rank} is in {report.doing}"
        return ""

    def _fail(self, reason: str) -> NoReturn:
        self._close_groups(reason)
        raise PeerError(self._failure)

    def _close_groups(self, reason: str) -> None:
        """Wake the other ranks, whether they wait in an exchange or in a joint call."""
        self._failure = f"{reason}: {ADVICE}"
        for comm in (*self._comms, self._meeting):
            comm.close()
