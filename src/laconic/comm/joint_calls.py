"""Joint calls: calls that every rank makes between steps, such as `state_dict(gather=True)`.

If one rank alone makes such a call, its messages must not meet those of an exchange of the others. So the
ranks first gather the names of their calls in a separate process group, and raise if they differ. A rank
that is only slow is waited for until the group's timeout. Meanwhile:

1. A rank that has waited for `report_s` writes its call or exchange to the store. A thread writes the number
   of begun exchanges.
2. If another rank has begun a later exchange without this call, this rank writes the reason to the store,
   closes its groups, which wakes ranks that wait for it, and raises.
3. The threads of the others find the reason, and their next exchange raises.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, NoReturn, TypeAlias

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from laconic.comm import waiting
from laconic.comm.at_exit import start_thread
from laconic.comm.gather_text import gather_text
from laconic.comm.naming import in_store
from laconic.comm.torch_comm import TorchComm
from laconic.comm.waiting import waiting_message
from laconic.core.errors import PeerError

Exchanging: TypeAlias = Callable[[str], AbstractContextManager[None]]
Proof: TypeAlias = Literal["begun", "waits", "none"]

ADVICE = (
    "every rank has to make this call, also one that writes no checkpoint and prints nothing: move it out of"
    " `if rank == 0:` or `if accelerator.is_main_process:`"
)
NEVER = 1 << 62  # exchanges of a rank that has ended
REPORT_S = 3.0  # seconds; shorter waits cost no round trip to the store
POLL_S = 0.5
FAILED = "failed"

log = logging.getLogger("laconic")


@dataclass(frozen=True)
class Report:
    doing: str
    calls: int
    exchanges: int
    waits: bool = True
    proof: str = "waits"


class Exchange(NamedTuple):
    number: int = 0
    calls: int = 0
    name: str = ""
    start: float = 0.0
    runs: bool = False


def unwatched(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class JointCalls:
    """Joint calls of the ranks of `comm`, created by all of them; holds a process group and a thread.

    Args:
        comm: The group whose exchanges are watched.
        others: Further groups of the same ranks, also closed by a failure.
        survives: Whether the ranks continue without a lost one.

    `failure`: why a joint call has failed here, or "".
    """

    def __init__(self, comm: TorchComm, *others: TorchComm, survives: bool = False) -> None:
        self._comms = comm, *others
        self._rank, self._size, self._survives = comm.rank, comm.size, survives
        self._report_s = min(REPORT_S, comm.timeout.total_seconds() / 4)
        self._calls = 0
        self._exchange = Exchange()  # replaced as a whole, for the thread
        self._in_call = False
        self.failure = ""
        self._found = ""
        self._closed = threading.Event()
        with ExitStack() as opened:
            self._meeting = TorchComm.own(comm.group)
            opened.callback(self._meeting.close)
            store = dist.distributed_c10d._get_default_store()
            prefix = f"{in_store(comm.group.group_name)}/calls"
            # a store serves one caller at a time, so the thread has its own
            self._store = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
            self._thread_store = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
            if self._size > 1:
                start_thread(self._watch, f"calls of rank {self._rank}", end=self._closed.set)
            opened.pop_all()

    def close(self) -> None:
        """Free thread and group. Other ranks' joint calls fail, unless training survives this."""
        # others may still look for a failed call
        if not self._closed.is_set() and not self.failure and not self._survives:
            self._report(self._store, Report("remove() or the end of its process", self._calls, NEVER))
        self.leave()

    def leave(self) -> None:
        """Close without failing the others' calls: all ranks continue in another group."""
        self._closed.set()
        self._meeting.close()

    def make(
        self,
        call: str,
        proof: Proof = "waits",
        serve: Callable[[], object] = lambda: None,
        interrupted: Callable[[], str] = str,
    ) -> None:
        """Wait until every rank makes this call. Return at once after `close`.

        Args:
            call: Its name.
            proof: Which later exchange of another rank proves that it does not make this call: any
                ("begun"), one in which it waits ("waits", default), or "none".
            serve: Joins exchanges that the others need first.
            interrupted: Returns why to stop waiting, or "".

        Raises:
            PeerError: On every rank: a rank did something else, or ended. The group is then unusable.
        """
        if self.failure:
            raise PeerError(self.failure)
        if self._closed.is_set():
            return
        try:
            serve()
        except PeerError as error:
            self._lose(call, error)
        self._in_call = True
        self._calls += 1
        self._meet(call, proof, interrupted)
        self._in_call = False  # not after a failure: others still look for this call

    def _meet(self, call: str, proof: Proof, interrupted: Callable[[], str]) -> None:
        names: list[str] = []
        failures: list[Exception] = []
        done = threading.Event()

        def meet() -> None:
            try:
                names.extend(gather_text(self._meeting, call))
            except Exception as error:
                failures.append(error)
            done.set()

        # nothing else can interrupt a wait for a rank that never comes
        start_thread(meet, f"{call} of rank {self._rank}", end=done.set)
        start, reported, logged = time.monotonic(), False, False
        while not done.wait(POLL_S):
            waited = time.monotonic() - start
            if waited >= self._report_s and not reported:
                reported = True
                self._report(self._store, Report(call, self._calls, self._exchange.number, proof=proof))
            if waited >= waiting.PATIENT_S and not logged:
                logged = True
                log.warning(waiting_message(self._rank, call))
            if reported and (elsewhere := self._elsewhere(proof) or self._found):
                self._fail(f"rank {self._rank} is in {call}, and {elsewhere}")
            if why := interrupted():
                raise PeerError(why)
        if failures:
            if elsewhere := self._elsewhere(proof):
                self._fail(f"rank {self._rank} is in {call}, and {elsewhere}")
            self._lose(call, failures[0])
        if len(names) < self._size:
            raise PeerError(f"rank {self._rank}: {call} was interrupted by the end of Python")
        for rank, name in enumerate(names):
            if name != call:
                self._fail(f"rank {self._rank} is in {call}, and rank {rank} is in {name}")

    @contextmanager
    def exchange(self, name: str) -> Iterator[None]:
        """Mark an exchange. A `PeerError` names the call behind it."""
        self._exchange = Exchange(self._exchange.number + 1, self._calls, name, time.monotonic(), True)
        try:
            if self._found and not self.failure:
                self._fail(f"rank {self._rank} is in {name}, and {self._missed_call() or self._found}")
            yield
        except PeerError as error:
            if not self.failure and (reason := self._missed_call()):
                self._close_groups(f"rank {self._rank} is in {name}, and {reason}")
                raise PeerError(self.failure) from error
            raise
        finally:
            self._exchange = self._exchange._replace(runs=False)

    def _watch(self) -> None:
        reported, waits, looked = 0, False, time.monotonic()
        while not self._closed.wait(POLL_S):
            last, now = self._exchange, time.monotonic()
            long = last.runs and now - last.start >= self._report_s
            look = now - looked >= self._report_s
            new = look and last.number > reported and not self._in_call  # a call has its own report
            if new or (long and (last.number, long) != (reported, waits)):
                reported, waits = last.number, long
                self._report(self._thread_store, Report(last.name, last.calls, last.number, long))
            if look:
                looked = now
                self._look()

    def _look(self) -> None:
        with suppress(RuntimeError):
            if not self._found and self._thread_store.check([FAILED]):
                self._found = self._thread_store.get(FAILED).decode()

    def _report(self, store: Store, report: Report) -> None:
        with suppress(RuntimeError):  # the process that holds the store has ended
            store.set(str(self._rank), json.dumps(asdict(report)))

    def _reports(self) -> Iterator[tuple[int, Report]]:
        with suppress(RuntimeError):
            for rank in range(self._size):
                if rank != self._rank and self._store.check([str(rank)]):
                    yield rank, Report(**json.loads(self._store.get(str(rank))))

    def _elsewhere(self, proof: Proof) -> str:
        """Return which rank has ended, or begun a later exchange without this call."""
        for rank, report in self._reports():
            proves = proof == "begun" or (proof == "waits" and report.waits) or report.exchanges == NEVER
            if proves and report.calls < self._calls and report.exchanges > self._exchange.number:
                return f"rank {rank} went on to {report.doing}"
        return ""

    def _missed_call(self) -> str:
        """Return which rank makes a call that this rank missed."""
        for rank, report in self._reports():
            contradicts = report.exchanges < self._exchange.number and report.proof != "none"
            if contradicts and report.calls > self._calls:
                return f"rank {rank} is in {report.doing}"
        return ""

    def _lose(self, call: str, error: Exception) -> NoReturn:
        reason = f"rank {self._rank} is in {call}, and another rank ended or is late ({error})"
        if self._survives:
            raise PeerError(reason)
        self._fail(reason)

    def _fail(self, reason: str) -> NoReturn:
        self._close_groups(reason)
        raise PeerError(self.failure)

    def _close_groups(self, reason: str) -> None:
        self.failure = f"{reason}: {ADVICE}"
        with suppress(RuntimeError):
            self._store.compare_set(FAILED, "", reason)
        for comm in (*self._comms, self._meeting):
            comm.close()
