"""Heartbeats: which ranks are alive, and the generations of groups that they form.

A receive that times out breaks its whole gloo group, and a stopped process sends nothing at all. So each rank
keeps a heartbeat in the store, and the ranks that are left form a new group.

1. A thread on every rank increments the rank's key in the store, and reads the keys of all others.
2. A rank whose communication fails requests the next generation, and marks itself as present.
3. When all ranks with a heartbeat are present, the first to see that writes the members, once.
4. A rank that is not a member was thought dead, as after a long stop: it requests another generation.
5. So does a new process that replaces a dead one: it is `rejoining`.

The store outlives every rank if a launcher or torchrun holds it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch marks no re-export

from laconic.core.errors import AttachError, PeerError

BEAT_S = 0.25
POLL_S = 0.02


class Heartbeats:
    """This rank's view of which ranks are alive. It holds a thread, which `close` ends.

    `members`: the ranks of the present generation, ascending. `rejoining`: another process had this rank
    before. `dead_after_s`: seconds of silence after which a rank counts as dead; default: 3.
    """

    def __init__(self, store: Store, rank: int, size: int, dead_after_s: float = 3.0) -> None:
        self.rank, self.size, self.dead_after_s = rank, size, dead_after_s
        self.members = tuple(range(size))
        self._store = store
        self.rejoining = bool(store.check([f"beat/{rank}"]))
        self.generation = self._latest() if self.rejoining else 0
        # a store serves one caller at a time, so the thread has its own; torch's type lacks `clone`
        self._thread_store: Store = store.clone()  # type: ignore[attr-defined]
        self._beats = dict.fromkeys(range(size), (-1, time.monotonic()))  # rank: (its count, when it changed)
        self._last_look = time.monotonic()
        self._closed = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of rank {rank}", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, store: Store, name: str, rank: int, size: int, dead_after_s: float = 3.0) -> Heartbeats:
        """Heartbeats whose keys in this store start with `name`."""
        return cls(PrefixStore(name, store), rank, size, dead_after_s)

    def check_same_training(self, mine: Mapping[str, str]) -> None:
        """Store what is equal on all ranks; a rejoining rank raises `AttachError` if it differs."""
        if not self.rejoining:
            self._store.set("alike", json.dumps(dict(mine)))
            return
        theirs: dict[str, str] = json.loads(self._store.get("alike"))
        for key, value in mine.items():
            if theirs.get(key) != value:
                raise AttachError(
                    f"rank {self.rank} has rejoined with another training: {key} is {value}, but the others"
                    f" have {theirs.get(key)}; start it with the same script and arguments"
                )

    def living(self) -> set[int]:
        """This rank and those with a recent heartbeat; all ranks if this process itself was stopped."""
        now = time.monotonic()
        if now - self._last_look > self.dead_after_s:
            return set(range(self.size))
        return {rank for rank, (_, at) in self._beats.items() if now - at < self.dead_after_s} | {self.rank}

    def regroup(self, timeout_s: float) -> tuple[int, ...]:
        """The members of a new generation, this rank among them. Called by every living rank.

        Raises `PeerError` if a living rank does not call it within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            generation = self.generation + 1
            self._store.set(f"{generation}/here/{self.rank}", "here")
            self._store.set(f"{generation}/called", "called")
            members = self._agreed_members(generation, deadline)
            self.generation = generation
            if self.rank in members:
                self.members = members
                return members

    def _agreed_members(self, generation: int, deadline: float) -> tuple[int, ...]:
        """Wait for this generation's members; write them if this rank is the first to see all present."""
        key = f"{generation}/members"
        while not self._store.check([key]):
            here = [rank for rank in range(self.size) if self._store.check([f"{generation}/here/{rank}"])]
            if self.living() <= set(here):
                self._store.compare_set(key, "", json.dumps(here))
            elif time.monotonic() > deadline:
                absent = sorted(self.living() - set(here))
                raise PeerError(f"rank {self.rank}: ranks {absent} are alive, but did not join the new group")
            else:
                time.sleep(POLL_S)
        return tuple(json.loads(self._store.get(key)))

    def _latest(self) -> int:
        """The last generation whose members are written."""
        generation = 0
        while self._store.check([f"{generation + 1}/members"]):
            generation += 1
        return generation

    @property
    def regroup_requested(self) -> bool:
        """Whether another rank waits for a new generation."""
        return bool(self._store.check([f"{self.generation + 1}/called"]))

    def close(self) -> None:
        """Stop the heartbeat."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        count = 0
        while not self._closed.wait(BEAT_S):
            count += 1
            try:
                self._beat(count)
                if time.monotonic() - self._last_look > self.dead_after_s:  # this process itself was stopped
                    self._beats = {rank: (-1, time.monotonic()) for rank in self._beats}
                self._read_beats()
            except RuntimeError:  # the store has gone, and the run with it: communication will raise
                return
            self._last_look = time.monotonic()

    def _beat(self, count: int) -> None:
        self._thread_store.set(f"beat/{self.rank}", str(count))

    def _read_beats(self) -> None:
        for rank, (last_count, _) in self._beats.items():
            if self._thread_store.check([f"beat/{rank}"]):
                count = int(self._thread_store.get(f"beat/{rank}"))
                if count != last_count:
                    self._beats[rank] = (count, time.monotonic())
