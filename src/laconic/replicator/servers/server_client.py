"""Pushing: a worker's side of the servers. A group of workers pushes through its first one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.gather_text import gather_text
from laconic.comm.metered import Metered
from laconic.core.errors import AttachError, NonFiniteError, PeerError, StateError
from laconic.core.layout import Layout
from laconic.exchange.agreement import agree
from laconic.exchange.gathered import GatheredState
from laconic.exchange.method import lift_codec
from laconic.exchange.state import FORMAT, Identity, RankState, check_shapes, label, model_digest, unlabel
from laconic.exchange.stats import Stats
from laconic.exchange.stopwatch import Seconds
from laconic.replicator.deployment import Seat
from laconic.replicator.parameters import named
from laconic.replicator.servers.described import dealt, described, settings
from laconic.replicator.servers.link import Link
from laconic.replicator.stats import ReplicatorStats
from laconic.strategies.controller import Controller
from laconic.strategies.strategy import Notes, Update


class Pushing(Controller):
    """Every step pushes this group's mean gradient, and loads what the servers have made of it.

    The wrapped optimiser never steps: servers have one of its kind, which gets the settings that its groups
    have at each push. It begins at the servers' parameters, or, where they have none yet, at its own.

    `number`: how many optimisers this replica has wrapped before. Raises `AttachError` if workers differ, and
    `SpecError` if `compressor` is no codec or selector.
    """

    def __init__(
        self, seat: Seat, optimizer: Optimizer, compressor: Any, name: str, seed: int, number: int
    ) -> None:
        self._seat, self._optimizer, self.name, self._seed = seat, optimizer, name, seed
        self._names = named(optimizer)
        _refuse_what_servers_cannot_keep(self._names)
        self.comm = Metered(seat.comm)
        self.steps, self.refused = 0, 0
        self.staleness: Counter[int] = Counter()
        self.dense_bytes, self._seconds = 0, Seconds()
        codec = lift_codec(compressor)
        told = {"name": name, "compressor": repr(codec), **described(optimizer, self._names)}
        told["number"] = number
        self._links = self._linked(told)
        self.layout = Layout.of((name, tuple(each.shape)) for each, name in self._names.items())
        alike = {"the optimiser's name": name, "the model": model_digest(self.layout), **_alike(told)}
        agree(seat.comm, lambda: alike)
        self._led(lambda link: link.open(told))
        self._load()
        self.comm.reset()

    def _linked(self, told: Mapping[str, Any]) -> list[Link]:
        """A link to each server that gets a tensor; on followers, which talk to none, the same without it."""
        parameters = list(self._names)
        homes = dealt([each.numel() for each in parameters], self._seat.server_count)
        links = []
        for server in sorted({*homes}):
            there = [each for each, home in zip(parameters, homes, strict=True) if home == server]
            own = {self._names[each]: each for each in there}
            pair = self.comm.over(self._seat.servers[server]) if self._seat.servers else None
            links.append(Link(server, pair, own, told["compressor"], self._seat, self.name, self._seed))
        return links

    def step(self, update: Update, loss: float | None) -> None:
        """Push the gradient instead of `update()`. Raises `NonFiniteError`, with nothing pushed."""
        size = self.comm.size
        for link in self._links:
            link.collect()
            if size > 1:
                self.comm.all_reduce(link.grad).div_(size)
        if not all(bool(link.grad.isfinite().all()) for link in self._links):
            raise NonFiniteError(
                f"a gradient of {self.name!r} is NaN or infinite: nothing was pushed; call"
                " optimizer.zero_grad() and go on, or lower the learning rate"
            )
        self._led_at_once(self._push)
        found = [link.staleness for link in self._links]
        if None in found:
            self.refused += 1
        else:
            self.staleness[max(each or 0 for each in found)] += 1
        self._load()
        self.steps += 1
        vars(self._optimizer)["_opt_called"] = True  # a schedule of torch looks whether steps come first

    def _push(self) -> None:
        began = time.perf_counter()
        groups = settings(self._optimizer)
        for link in self._links:
            link.encode(self.steps)
        self._seconds.encode_s += time.perf_counter() - began
        for link in self._links:  # to all servers first: they work at the same time
            link.push(groups, self.steps)
        for link in self._links:
            link.take_answer(self.steps)
        self.dense_bytes += sum(link.dense_sent for link in self._links)

    def _led(self, act: Callable[[Link], None]) -> None:
        """Done for each link by the first replica of a group."""

        def each() -> None:
            for link in self._links:
                act(link)

        self._led_at_once(each)

    def _led_at_once(self, act: Callable[[], None]) -> None:
        """Done by the first replica of a group for all: they share its outcome, and its tensors."""
        failure: Exception | None = None
        if self._seat.servers:
            try:
                act()
            except Exception as error:
                failure = error
        if self.comm.size > 1:
            heard = gather_text(self.comm, str(failure or ""))[0]
            if heard and failure is None:
                raise PeerError(f"replica 0 of this group says: {heard}")
        if failure is not None:
            raise failure
        for link in self._links if self.comm.size > 1 else ():
            self.comm.broadcast(link.flat)
            numbers = torch.tensor(
                [link.version, -1 if link.staleness is None else link.staleness],
                dtype=torch.int64,
                device="cpu",
            )
            link.version, staleness = self.comm.broadcast(numbers).tolist()
            link.staleness = None if staleness < 0 else staleness

    def _load(self) -> None:
        for link in self._links:
            link.load()

    def stats(self) -> ReplicatorStats:
        meter = self.comm.snapshot()
        self._seconds.communicate_s = meter.seconds
        stats = Stats.of(meter, self._seconds, steps=self.steps, dense=self.dense_bytes)
        updates = min(link.version for link in self._links)
        return ReplicatorStats(
            **vars(ReplicatorStats.over(stats))
            | {"updates": updates, "staleness": dict(self.staleness), "refused": self.refused}
        )

    def notes(self) -> Notes:
        return {"version": [link.version for link in self._links]}

    def averaged(self) -> AbstractContextManager[float]:
        return nullcontext(0.0)

    def finish(self) -> None:
        """Load the servers' parameters. Called by all replicas of a group."""
        self._led(Link.pull)
        self._load()

    @property
    def rank(self) -> int:
        return self._seat.group

    def _identity(self) -> Identity:
        return Identity(
            format=FORMAT,
            spec=repr(self._links[0].codec),
            model=model_digest(self.layout),
            rank=self._seat.group,
            size=self._seat.groups,
            seed=self._seed,
        )

    def state_dict(self) -> RankState:
        """What this worker has not sent yet; parameters and momentum are in the servers' checkpoints."""
        kept = {f"residual/{link.server}": link.residual.clone() for link in self._links if link.keeps}
        return RankState(**self._identity(), step=self.steps, tensors=label(kept, self._seat.group))

    def gathered(self, optimiser: Mapping[str, Any]) -> tuple[GatheredState, list[Any]]:
        raise StateError(
            "workers on servers never meet, so nobody can gather their states: Replicator(checkpoints=folder)"
            " lets the servers write theirs, and state_dict() gives this worker's own"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        tensors, own = unlabel(state, self._identity()), self.state_dict()["tensors"]
        check_shapes(unlabel({**state, "tensors": own}, self._identity()), tensors, "optimiser")
        for link in self._links if tensors else ():
            link.residual.copy_(tensors[f"residual/{link.server}"])
        self.steps = int(state["step"])

    def discard(self) -> None:
        for link in self._links:
            link.residual.zero_()

    def remove(self) -> None:
        """The deployment says goodbye to the servers."""


def _alike(told: Mapping[str, Any]) -> dict[str, str]:
    return {"the optimiser": str(told["class"]), "compressor=": str(told["compressor"])}


def _refuse_what_servers_cannot_keep(names: Mapping[Tensor, str]) -> None:
    for each, name in names.items():
        if each.is_complex():
            raise AttachError(
                f"{name} is complex, and servers keep float32: give its real and imaginary parts as two"
                " parameters, or take 'sync' or 'local'"
            )
        if each.dtype == torch.float64:
            raise AttachError(
                f"{name} is float64, and servers keep float32, which would round it: make the model float32"
                " by model.float() before its optimiser, or take 'sync' or 'local'"
            )
