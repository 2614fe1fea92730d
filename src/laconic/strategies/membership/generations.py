"""Generations: the groups that living ranks form after one another.

A receive that times out breaks its whole gloo group. So ranks agree on the next group in the store:

1. A rank whose communication fails requests the next generation, and marks itself as present.
2. When all members with a heartbeat are present, the first to notice writes the new members, once. A member
   that hangs is excluded after a time limit.
3. An excluded rank, or a new process in its place (`rejoining`), requests another generation. Without a
   member of the last one it forms none, as the training continues elsewhere, or has ended.
4. A rank that waits in `finish()` requests a generation of those that still train, and marks itself as
   present only when every member waits there too.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch.distributed import Store  # type: ignore[attr-defined]

from laconic.core.errors import AttachError, PeerError
from laconic.strategies.membership.finishers import Finishers, Place, Standstill
from laconic.strategies.membership.heartbeats import BEAT_S, Heartbeats

POLL_S = 0.02
WHY = 300  # maximum length of a reason
SURE_S = 4 * BEAT_S  # after this time a running process has sent a heartbeat
STILL_S = 1.0  # after this time in one step a rank may be waiting for another


class Generations(Heartbeats):
    """This rank's view of the group.

    `members`: the ranks of the current generation. `finishing`: ranks that are no members because they wait
    in `finish()`. `waited`: this rank was one of them, and missed no generation otherwise. `_outside`: this
    rank is to be readmitted. `hung_after_s`: seconds without a step of a living rank while others wait in
    `finish()`.
    """

    hung_after_s = 1800.0

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(store, rank, size)
        self.members = tuple(range(size))
        self.finishing: tuple[int, ...] = ()
        self.waited, self.why, self.generation = False, "", 0
        self.finishers, self._standstill = Finishers(store, rank, size), Standstill()
        if self.rejoining:
            self.finishers.forget()
            if latest := self._latest():
                self._enter(latest)
        self._outside = self.rejoining
        self._requested, self._requested_at = 0, -math.inf  # generation; when the thread last asked

    def check_same_training(self, mine: Mapping[str, str]) -> None:
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

    def regroup(self, why: str, grace_s: float, timeout_s: float, quorum: int = 1) -> tuple[int, ...]:
        """Return the members of a new generation, including this rank. Called by every living rank.

        Living members that do not arrive are excluded after `grace_s` seconds if half are present, else after
        `timeout_s`. Raises `PeerError` if fewer than `quorum` remain, if this rank is excluded and not
        readmitted for `timeout_s`, or if the store is gone.
        """
        start, taken_in, self.waited = time.monotonic(), False, False
        with self._reaching_the_store():
            while not taken_in:
                if self._outside:
                    why = f"rank {self.rank} was excluded, or is a new process, and rejoins"
                self._store.compare_set(f"{self.generation + 1}/called", "", why[:WHY])
                if self.finishers.waits:
                    self._wait_for_trainers()
                    self._store.compare_set(f"{self.generation + 1}/called", "", "all ranks have finished")
                    start = time.monotonic()
                how = "outside" if self._outside else "here"
                self._store.set(f"{self.generation + 1}/here/{self.rank}", how)
                self._agree(self.generation + 1, start, start + grace_s, start + timeout_s, quorum)
                self._enter(self.generation + 1)
                taken_in = self.rank in self.members
        return self.members

    def _wait_for_trainers(self) -> None:
        while True:
            while self._store.check([f"{self.generation + 1}/members"]):
                self._enter(self.generation + 1)
                self.waited = not self._outside
            self._renew_connection()
            late = {*self.members} & self.living() - self.finishers.places().keys()
            late -= {rank for rank in late if self._comes_back(rank)}
            if not late or self._standstill.lasts_s(self._steps_of(late)) > self.hung_after_s:
                return
            time.sleep(POLL_S)

    def _comes_back(self, rank: int) -> bool:
        key = f"{self.generation + 1}/here/{rank}"
        return bool(self._store.check([key])) and self._store.get(key) == b"outside"

    def _agree(self, generation: int, start: float, late: float, end: float, quorum: int) -> None:
        """Wait for this generation's members; write them if this rank is the first to find all present.

        `late`, `end`: when members with a heartbeat are excluded.
        """
        key, own_wait = f"{generation}/members", self.finishers.waits
        while not self._store.check([key]):
            self._renew_connection()
            living, waiting = self.living(), {*self.finishers.places()}
            marked = {rank for rank in range(self.size) if self._store.check([f"{generation}/here/{rank}"])}
            here = marked & living
            before = {*self.members} | (waiting if own_wait and not self._outside else set())
            before -= {self.rank} if self._outside else set()
            now, absent = time.monotonic(), before & living - here
            if marked - here and now < start + SURE_S:  # one has just resumed: it beats soon, or is dead
                time.sleep(POLL_S)
                continue
            if before & here and not own_wait:
                absent -= waiting
            if not before & here:  # this rank was excluded, and is here before all others
                if not absent or now > end:
                    raise PeerError(self._nobody_came(sorted(absent)))
            elif not absent or now > end or (now > late and len(before & here) >= len(absent)):
                if len(here | waiting & living) >= quorum:
                    entry = {"members": sorted(here), "finishing": [] if own_wait else sorted(waiting - here)}
                    self._store.compare_set(key, "", json.dumps(entry))
                    continue
                if not absent or now > end:
                    raise PeerError(self._too_few(sorted(here), quorum))
            time.sleep(POLL_S)

    def _enter(self, generation: int) -> None:
        self.generation = generation
        entry = json.loads(self._store.get(f"{generation}/members"))
        self.members, self.finishing = tuple(entry["members"]), tuple(entry["finishing"])
        self.why = self._store.get(f"{generation}/called").decode()
        self._outside = self.rank not in (*self.members, *self.finishing)

    def wait_to_finish(self, steps: int, *, clocked: bool, shared: bool, independent: bool) -> str:
        """Wait until all ranks are in `finish()`; return why they need a new group first, or "".

        `clocked`: ranks may communicate after different numbers of steps. `shared`: ranks count steps
        together, so another may wait for this one in any step. `independent`: no rank waits for another in a
        step.
        """
        self._begun, self._standstill = {}, Standstill()
        with self._reaching_the_store():
            self.finishers.announce(Place(self.generation, steps))
            while not self._is_requested():
                places, living = self.finishers.places(), self.living()
                present = {rank for rank, place in places.items() if place.generation == self.generation}
                late = {*self.members} - present
                if not late:
                    if waiting := sorted(places.keys() & living - {*self.members}):
                        return f"ranks {waiting} wait in finish()"
                    alike = clocked or independent or len({places[rank].steps for rank in self.members}) == 1
                    return "" if alike else "ranks have finished after different numbers of steps"
                if lost := sorted(late - living):
                    return f"ranks {lost} have no heartbeat"
                begun = self._steps_of(late)
                still_s = self._standstill.lasts_s(begun)
                if still_s > self.hung_after_s:
                    return f"ranks {sorted(late)} have started no step for {still_s:.0f} s"
                if not independent and (max(begun.values()) > steps or (shared and still_s > STILL_S)):
                    return f"rank {self.rank} has finished, and others continue training"
                time.sleep(POLL_S)
        return "another rank has requested a new group"

    def end_finish(self) -> None:
        with self._reaching_the_store():
            self.finishers.withdraw()

    def _nobody_came(self, absent: list[int]) -> str:
        told = f"ranks {absent} do not readmit it" if absent else "their training has ended"
        return (
            f"rank {self.rank} did not arrive in time, and the others continued without it as ranks"
            f" {[*self.members]}; {told}: restart it from a checkpoint, or raise patience_s"
        )

    def _too_few(self, here: list[int], quorum: int) -> str:
        return (
            f"rank {self.rank}: only ranks {here} of {self.size} are left, and quorum={quorum} requires"
            " more: restart the training from a checkpoint, or lower quorum"
        )

    def _latest(self) -> int:
        generation = 0
        while self._store.check([f"{generation + 1}/members"]):
            generation += 1
        return generation

    @property
    def regroup_requested(self) -> bool:
        """Whether another rank waits for a new generation. Raises `PeerError` if the store is gone.

        The thread's last answer, as a distant store answers late; asks the store if that is old.
        """
        if not self._is_old(self._requested_at):
            return self._requested > self.generation
        with self._reaching_the_store():
            return self._is_requested()

    def _is_requested(self) -> bool:
        called: bool = self._store.check([f"{self.generation + 1}/called"])
        self._renew_connection()
        return called

    def _look(self, store: Store) -> None:
        asked_at, generation = time.monotonic(), self.generation + 1
        if self._ask(store, "check", [f"{generation}/called"]):
            self._requested = generation
        self._requested_at = asked_at
        super()._look(store)

    @contextmanager
    def _reaching_the_store(self) -> Iterator[None]:
        try:
            yield
        except PeerError:
            raise
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.rank}: the store, by which ranks find each other, is gone: the process that"
                f" holds it has ended, or its machine cannot be reached: {error}"
            ) from error
