"""Roster: which ranks are alive, and the generations of groups that they form.

A receive that times out breaks its whole gloo group, and a process that is stopped says nothing at all: so
liveness is a heartbeat in the store, and whoever is left forms a new group.

1. Every rank beats: a thread counts up its key in the store, and looks at those of all others.
2. A rank whose communication fails calls the next generation, and lays down that it is here.
3. When all who beat are here, the first to see that writes the list of members; it is written once.
4. Who is not on the list was taken for dead, as after a long stop: it calls the generation after that.
5. So does a new process in the seat of one that has died: it is `late`.

The store outlives any rank where it is that of a launcher or of torchrun.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch marks no re-export

from laconic.core.errors import AttachError, PeerError

BEAT_S = 0.25
GLANCE_S = 0.02


class Roster:
    """This rank's view of the living. `members`: the ranks of the present generation, ascending.

    `dead_after_s`: how long a rank may be silent. `late`: another process has had this rank before. Closed by
    `close`; what it holds is a thread.
    """

    def __init__(self, store: Store, rank: int, size: int, dead_after_s: float = 3.0) -> None:
        self.rank, self.size, self.dead_after_s = rank, size, dead_after_s
        self.members = tuple(range(size))
        self._store = store
        self.late = bool(store.check([f"beat/{rank}"]))
        self.generation = self._latest() if self.late else 0
        # the thread's own, as a store serves one caller at a time; its type has no clone, it has
        self._pulse: Store = store.clone()  # type: ignore[attr-defined]
        self._heard = dict.fromkeys(range(size), (-1, time.monotonic()))  # rank: (its count, when it changed)
        self._looked = time.monotonic()
        self._closed = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._beat_on, name=f"heartbeat of rank {rank}", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, store: Store, name: str, rank: int, size: int, dead_after_s: float = 3.0) -> Roster:
        """One whose keys in this store begin with `name`."""
        return cls(PrefixStore(name, store), rank, size, dead_after_s)

    def alike(self, mine: Mapping[str, str]) -> None:
        """Lay down what all ranks have alike; one that is late compares. Raises `AttachError` there."""
        if not self.late:
            self._store.set("alike", json.dumps(dict(mine)))
            return
        theirs: dict[str, str] = json.loads(self._store.get("alike"))
        for key, value in mine.items():
            if theirs.get(key) != value:
                raise AttachError(
                    f"rank {self.rank} has come back with another training: {key} is {value}, the others have"
                    f" {theirs.get(key)}; start it with the same script and arguments"
                )

    def living(self) -> set[int]:
        """The ranks that have beaten lately, with this one. All, where this process itself stood still."""
        now = time.monotonic()
        if now - self._looked > self.dead_after_s:
            return set(range(self.size))
        return {rank for rank, (_, at) in self._heard.items() if now - at < self.dead_after_s} | {self.rank}

    def regroup(self, timeout_s: float) -> tuple[int, ...]:
        """The members of a new generation, this rank among them. Called by every living rank of the old one.

        Raises `PeerError` where those who live do not all come within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            generation = self.generation + 1
            self._store.set(f"{generation}/here/{self.rank}", "here")
            self._store.set(f"{generation}/called", "called")
            members = self._decided(generation, deadline)
            self.generation = generation
            if self.rank in members:
                self.members = members
                return members

    def _decided(self, generation: int, deadline: float) -> tuple[int, ...]:
        """The list of this generation, once it is written; by this rank, where it is the first to see it."""
        key = f"{generation}/members"
        while not self._store.check([key]):
            here = [rank for rank in range(self.size) if self._store.check([f"{generation}/here/{rank}"])]
            if self.living() <= set(here):
                self._store.compare_set(key, "", json.dumps(here))
            elif time.monotonic() > deadline:
                late = sorted(self.living() - set(here))
                raise PeerError(f"rank {self.rank}: ranks {late} beat, and did not come to a new group")
            else:
                time.sleep(GLANCE_S)
        return tuple(json.loads(self._store.get(key)))

    def _latest(self) -> int:
        """The last generation whose members are decided."""
        generation = 0
        while self._store.check([f"{generation + 1}/members"]):
            generation += 1
        return generation

    @property
    def called(self) -> bool:
        """Whether another rank waits for a new generation."""
        return bool(self._store.check([f"{self.generation + 1}/called"]))

    def close(self) -> None:
        """Beat no more."""
        self._closed.set()
        self._thread.join()

    def _beat_on(self) -> None:
        count = 0
        while not self._closed.wait(BEAT_S):
            count += 1
            try:
                self._beat(count)
                if time.monotonic() - self._looked > self.dead_after_s:  # who was silent was not heard
                    self._heard = {rank: (-1, time.monotonic()) for rank in self._heard}
                self._look()
            except RuntimeError:  # the store has gone, and with it the run: whoever communicates will say so
                return
            self._looked = time.monotonic()

    def _beat(self, count: int) -> None:
        self._pulse.set(f"beat/{self.rank}", str(count))

    def _look(self) -> None:
        for rank, (known, _) in self._heard.items():
            if self._pulse.check([f"beat/{rank}"]):
                count = int(self._pulse.get(f"beat/{rank}"))
                if count != known:
                    self._heard[rank] = (count, time.monotonic())
