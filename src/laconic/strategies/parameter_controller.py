"""Parameter controller: runs a strategy among ranks that exchange parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.core.errors import NonFiniteError, PeerError, StateError
from laconic.exchange.agreement import accepted_by_all
from laconic.exchange.gathered import GatheredState, gather_states, gathered, own_part
from laconic.exchange.state import Identity, RankState, identity, label, unlabel
from laconic.exchange.stats import Stats
from laconic.strategies.alone import Alone, or_alone
from laconic.strategies.controller import Controller
from laconic.strategies.finishing import adopt_consensus
from laconic.strategies.joint import call_if_it_drains, make_jointly
from laconic.strategies.membership import Membership
from laconic.strategies.membership.average import Stand, average_
from laconic.strategies.replica import Replica
from laconic.strategies.several import each_of
from laconic.strategies.shared_scaler import SharedScaler
from laconic.strategies.strategy import Notes, Strategy, Update

Statistics = Literal["average", "keep"]
MOST_CALLS = 1 << 20  # between two steps


class ParameterController(Controller):
    """Controller that runs a strategy, and survives a lost rank if its membership does.

    The others then form a new group with their exact average. An interrupted step counts as done, and every
    rank adopts the largest step count. An interrupted call between steps is repeated, unless a rank has
    completed it.
    """

    def __init__(
        self,
        strategy: Strategy,
        replica: Replica,
        optimizer: Optimizer,
        membership: Membership,
        *,
        seed: int,
        statistics: Statistics,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.strategy = strategy
        self.shares_gradients = strategy.shares_gradients
        self.mixes_scales = strategy.shares_gradients and scaler is None
        self.replica = replica
        self.membership = membership
        self.optimizer = optimizer
        self._seed = seed
        self._statistics = statistics
        self.removed = False
        self._nobody_trained = False  # at the last regroup
        self._shows_average = False
        self._memory: dict[str, Tensor] = {}
        self._calls = 0  # since the last step
        self._furthest = (0, 0)  # steps and calls of the furthest rank at the last regroup
        self.shared_scaler: SharedScaler | None = None
        if membership.rejoining:
            self._rejoin()
        else:
            self.bound = strategy.bind(replica, optimizer, membership.comm, seed)
        try:
            replica.publish()
            membership.comm.reset()
            if scaler is not None:
                self.shared_scaler = SharedScaler(scaler, membership.side_meter, membership.exchanging)
        except BaseException:
            self.bound.abandon()
            raise

    def __repr__(self) -> str:
        comm, n = self.bound.comm, self.replica.layout.numel
        return f"<{self.strategy!r} on {n:,} elements, rank {comm.rank} of {comm.size}>"

    def _rejoin(self) -> None:
        self.bound = Alone().bind(self.replica, self.optimizer, self.membership.comm, self._seed)
        self._regroup(0, "a new process has taken the place of a lost one", trained=False)
        if self._nobody_trained:
            raise PeerError(
                "this rank has rejoined, but no other rank has a model to load: the training has"
                " ended; restart it from a checkpoint"
            )

    def step(self, update: Update, loss: float | None) -> None:
        self._check_own()
        self.replica.check_views()
        self._calls = 0
        if self.membership.heartbeats is not None:
            self.membership.heartbeats.steps_begun = self.bound.steps + 1
        if self.membership.regroup_requested:
            update()
            self._regroup(self.bound.steps + 1, "another rank has requested a new group")
        elif error := self._loses_rank(lambda: self._step_bound(update, loss)):
            self._regroup(self.bound.steps + 1, error)

    def _step_bound(self, update: Update, loss: float | None) -> None:
        with self.membership.exchanging(f"step {self.bound.steps}"):
            self.bound.step(update, loss)

    def _collectively(self, call: str, act: Callable[[], object], last: bool = False) -> None:
        """Run `act` on all ranks between steps. `call`: its name, if collective; `last`: it ends training."""
        self._check_own()
        self._calls += 1
        while (self.bound.steps, self._calls) >= self._furthest and (error := self._loses_rank(act, call)):
            steps = self.bound.steps
            self._regroup(steps, error)
            if self.bound.steps > steps:
                if not last:
                    return
                self._calls = self._furthest[1]

    def _check_own(self) -> None:
        if self._shows_average:
            raise StateError(
                "inside `with optimizer.averaged()` the model is the group's average, and this rank's model"
                " is restored at the end, so training or loading there would be lost: exit it first"
            )

    def _loses_rank(self, act: Callable[[], object], call: str = "") -> str:
        """Return how a rank was lost, or ""; the error would keep the old group alive."""
        try:
            make_jointly(call, self.bound, self.strategy, self.membership)
            act()
        except PeerError as error:
            if self.membership.heartbeats is None or self.membership.failure:
                raise
            return str(error)
        return ""

    def _regroup(self, steps: int, why: str, trained: bool = True) -> None:
        model, membership, before = self.bound.salvage().clone(), self.membership, self.membership.living
        memory = {key: value.clone() for key, value in self.bound.agreed().items()}
        self._memory = memory or self._memory
        dense_bytes, seconds, generation = self.bound.dense_bytes, self.bound.seconds, membership.generation
        self.bound.abandon()
        alone = Alone().bind(self.replica, self.optimizer, membership.comm, self._seed)
        self.bound = alone  # releases the old group
        while True:
            membership.renew(why)
            with suppress(PeerError):  # retry after another loss
                present = membership.waited or membership.generation == generation + 1
                place = steps * MOST_CALLS + self._calls
                stand = Stand(place, present, trained, self._memory, up_to_date=bool(memory))
                agreed = average_(
                    self.replica, model, stand, membership.side_comm, self._statistics == "keep"
                )
                own, fall_back = membership.comm, bool(membership.finishing)
                chosen = or_alone(self.strategy, own.size, each_of(self.optimizer), fall_back)
                self.bound = chosen.bind(self.replica, self.optimizer, own, self._seed)
                break
        self._memory, self._furthest = agreed.memory, divmod(agreed.place, MOST_CALLS)
        self._nobody_trained = not agreed.trained
        kept = self.bound.agreed()
        for key in kept.keys() & agreed.memory.keys():
            kept[key].copy_(agreed.memory[key])
        self.bound.steps, self.bound.dense_bytes, self.bound.seconds = self._furthest[0], dense_bytes, seconds
        fresh = self.bound.state_dict().keys() - agreed.memory.keys()
        membership.tell(before, self.bound.steps, agreed, fresh)

    def stats(self) -> Stats:
        meter = self.bound.comm.snapshot()
        seconds = replace(self.bound.seconds, communicate_s=meter.seconds)
        return Stats.of(meter, seconds, steps=self.bound.steps, dense=self.bound.dense_bytes)

    def notes(self) -> Notes:
        living = {} if self.membership.heartbeats is None else {"living": self.membership.living}
        return self.bound.notes() | living

    @contextmanager
    def averaged(self) -> Iterator[float]:
        kept: list[Tensor] = []
        distance = 0.0

        def show() -> None:
            nonlocal kept, distance
            model = self.bound.consensus(self.membership.side_comm)
            distance = self.replica.distance(model, self.membership.side_comm)
            own = [each.clone() for each in (self.replica.flat, *self.replica.statistics)]
            self._load(model)
            kept = own

        self._collectively("averaged()", show)
        self._shows_average = True
        try:
            yield distance
        finally:
            self._shows_average = False
            for each, own in zip((self.replica.flat, *self.replica.statistics), kept, strict=bool(kept)):
                each.copy_(own)

    def finish(self) -> None:
        def load() -> None:
            self._load(adopt_consensus(self.bound, self.membership, self.strategy))

        try:
            self._collectively("finish()", load, last=True)
        finally:
            if self.membership.heartbeats is not None:
                self.membership.heartbeats.end_finish()

    def _load(self, model: Tensor) -> None:
        self.replica.flat.copy_(model)
        self.replica.publish()
        if self._statistics == "average":
            self.replica.mean_statistics_(self.membership.side_comm)

    @property
    def rank(self) -> int:
        return self.bound.comm.rank

    def state_dict(self) -> RankState:
        self._collectively(call_if_it_drains("state_dict()", self.bound), self._drain)
        return self._state()

    def _drain(self) -> None:
        self.bound.drain(self.membership.side_comm)

    def gathered(self, optimiser: Mapping[str, Any]) -> tuple[GatheredState, list[Any]]:
        found: list[tuple[GatheredState, list[Any]]] = []

        def gather() -> None:
            comm = self.membership.side_comm
            self.bound.drain(comm)
            found.append((gather_states(self._state(), comm), gathered(optimiser, comm)))

        self._collectively("state_dict(gather=True)", gather)
        if not found:
            raise PeerError("a rank was lost while the states of all were gathered: gather them again")
        return found[-1]

    def _state(self) -> RankState:
        tensors = {"flat": self.replica.flat} | self.bound.state_dict()
        copies = {key: value.clone() for key, value in tensors.items()}
        held = label(copies, self.bound.comm.rank)
        return RankState(**self._identity(), step=self.bound.steps, tensors=held)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}

        def check() -> None:
            comm = self.bound.comm
            own.update(own_part(state, comm.rank, comm.size))
            tensors.update(unlabel(own, self._identity()))
            self.bound.check_state({key: value for key, value in tensors.items() if key != "flat"})

        def discard() -> None:  # pending messages belong to the previous model
            accepted_by_all(self.membership.side_comm, check)
            with suppress(NonFiniteError):  # may be why the state is loaded
                self.bound.drain(self.membership.side_comm)

        self._collectively("load_state_dict()", discard)
        flat = tensors.pop("flat")
        self.bound.load_state_dict(tensors, int(own["step"]))
        self.replica.flat.copy_(flat)
        self._furthest = (0, 0)
        empty = torch.zeros(1, dtype=torch.float32, device="cpu")  # no rank goes ahead
        self._collectively("load_state_dict()", partial(self.membership.side_comm.all_reduce, empty))

    def discard(self) -> None:
        """Do nothing: dropped gradients leave no residual."""

    def _identity(self) -> Identity:
        comm = self.bound.comm
        return identity(self.strategy, self.replica.layout, comm.rank, comm.size, self._seed)

    def remove(self) -> None:
        self._collectively(call_if_it_drains("remove()", self.bound), self._drain, last=True)
        self.bound.close()
        if self.shared_scaler is not None:
            self.shared_scaler.remove()
        self.replica.publish()
        self.replica.release()
        self.membership.close()
        self.removed = True
