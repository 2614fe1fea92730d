"""Heartbeats: detection of living ranks through a store.

The store outlives every rank if a launcher or torchrun holds it.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from laconic.comm.at_exit import start_thread

BEAT_S = 0.25
Kind = TypeVar("Kind", bound="Heartbeats")


class Heartbeats:
    """This rank's view of the living ranks. `close` ends its thread.

    `rejoining`: another process had this rank before. `dead_after_s`: seconds until a rank without a
    heartbeat counts as dead.
    """

    dead_after_s = 10.0

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank, self.size, self.steps_begun = rank, size, 0
        self._store = store
        self.rejoining = bool(store.check([f"beat/{rank}"]))
        self._begun: dict[int, int] = {}  # steps, by rank
        now = time.monotonic()
        self._beats = dict.fromkeys(range(size), (-1, now))  # rank: (count, when it changed)
        self._last_look, self._count, self._closed = now, 0, threading.Event()

    @classmethod
    def of(cls: type[Kind], store: Store, name: str, rank: int, size: int) -> Kind:
        """Start heartbeats under the prefix `name` of `store`."""
        made = cls(PrefixStore(name, store), rank, size)
        made._start()
        return made

    def _start(self) -> None:
        """Start a thread with its own connection: a store serves one caller at a time."""
        own = self._thread_store = self._store.clone()  # type: ignore[attr-defined]
        self._beat(own)
        name = f"heartbeat of rank {self.rank}"
        self._thread = start_thread(partial(self._run, own), name, end=self._closed.set)

    def _renew_connection(self) -> None:
        """Replace a thread whose connection is silent: after an outage TCP may retry late."""
        if self._is_old(self._last_answer) and not self._closed.is_set():
            self._start()

    def _is_old(self, at: float) -> bool:
        return time.monotonic() - at > self.dead_after_s / 4

    def living(self) -> set[int]:
        """Return this rank and those with a recent heartbeat; all ranks if this process was stopped."""
        look = self._last_look  # ages do not grow while this process is stopped
        if time.monotonic() - look > self.dead_after_s:
            return set(range(self.size))
        return {rank for rank, (_, at) in self._beats.items() if look - at < self.dead_after_s} | {self.rank}

    def _steps_of(self, ranks: set[int]) -> dict[int, int]:
        return {rank: self._begun.get(rank, 0) for rank in ranks}

    def end(self) -> None:
        self._closed.set()

    def close(self) -> None:
        self.end()
        self._thread.join()

    def _run(self, store: Store) -> None:
        while not self._closed.wait(BEAT_S) and store is self._thread_store:
            try:
                self._beat(store)
                if time.monotonic() - self._last_look > self.dead_after_s:  # this process itself was stopped
                    self._beats = {rank: (-1, time.monotonic()) for rank in self._beats}
                self._look(store)
            except RuntimeError:  # communication will raise
                return
            self._last_look = time.monotonic()

    def _ask(self, store: Store, call: str, *given: Any) -> Any:
        answer = getattr(store, call)(*given)
        if store is not self._thread_store:
            raise RuntimeError("another thread has replaced this one")
        self._last_answer = time.monotonic()
        return answer

    def _beat(self, store: Store) -> None:
        self._ask(store, "set", f"beat/{self.rank}", f"{self._count} {self.steps_begun}")
        self._count += 1

    def _look(self, store: Store) -> None:
        present = [
            rank
            for rank, (count, _) in self._beats.items()
            if count >= 0 or self._ask(store, "check", [f"beat/{rank}"])
        ]
        answers = self._ask(store, "multi_get", [f"beat/{rank}" for rank in present])
        for rank, answer in zip(present, answers, strict=True):
            count, begun = map(int, answer.split())
            if count != self._beats[rank][0]:
                self._beats[rank] = (count, time.monotonic())
                self._begun[rank] = begun
