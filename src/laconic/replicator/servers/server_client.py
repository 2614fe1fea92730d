"""ServerClient: a worker's side of the servers."""

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
from laconic.exchange.state import Identity, RankState, check_shapes, identity, label, model_digest, unlabel
from laconic.exchange.stats import Stats
from laconic.exchange.stopwatch import Seconds
from laconic.replicator.deployment import RankContext
from laconic.replicator.parameters import named
from laconic.replicator.servers.link import Link
from laconic.replicator.servers.optimizer_config import assign, settings, to_config
from laconic.replicator.stats import ReplicatorStats
from laconic.strategies.controller import Controller
from laconic.strategies.strategy import Notes, Update


class ServerClient(Controller):
    """Controller that pushes the group's mean gradient at each step and loads the updated parameters.

    The wrapped optimiser never steps: servers have a copy, which gets the current settings with each push.
    """

    def __init__(
        self, seat: RankContext, optimizer: Optimizer, compressor: Any, name: str, seed: int, number: int
    ) -> None:
        self._rank_context, self._optimizer, self.name, self._seed = seat, optimizer, name, seed
        self._names = named(optimizer)
        _check_dtypes(self._names)
        self.comm = Metered(seat.comm)
        self.steps, self.refused = 0, 0
        self.staleness: Counter[int] = Counter()
        self.dense_bytes, self._seconds = 0, Seconds()
        codec = lift_codec(compressor)
        config = {"name": name, "compressor": repr(codec), **to_config(optimizer, self._names)}
        config["number"] = number
        self._links = self._make_links(config)
        self.layout = Layout.of((name, tuple(each.shape)) for each, name in self._names.items())
        alike = {"the optimiser's name": name, "the model": model_digest(self.layout), **_must_match(config)}
        agree(seat.comm, lambda: alike)
        self._for_each_link(lambda link: link.open(config))
        self._load()
        self.comm.reset()

    def _make_links(self, config: Mapping[str, Any]) -> list[Link]:
        parameters = list(self._names)
        homes = assign([each.numel() for each in parameters], self._rank_context.server_count)
        links = []
        for server in sorted({*homes}):
            there = [each for each, home in zip(parameters, homes, strict=True) if home == server]
            own = {self._names[each]: each for each in there}
            pair = self.comm.over(self._rank_context.servers[server]) if self._rank_context.servers else None
            links.append(
                Link(server, pair, own, config["compressor"], self._rank_context, self.name, self._seed)
            )
        return links

    def step(self, update: Update, loss: float | None) -> None:
        size = self.comm.size
        for link in self._links:
            link.collect()
            if size > 1:
                self.comm.all_reduce(link.grad).div_(size)
        if not all(bool(link.grad.isfinite().all()) for link in self._links):
            raise NonFiniteError(
                f"a gradient of {self.name!r} is NaN or infinite: nothing was pushed; call"
                " optimizer.zero_grad() and continue, or lower the learning rate"
            )
        self._on_leader(self._push)
        found = [link.staleness for link in self._links]
        if None in found:
            self.refused += 1
        else:
            self.staleness[max(each or 0 for each in found)] += 1
        self._load()
        self.steps += 1
        vars(self._optimizer)["_opt_called"] = True  # torch's schedulers check this

    def _push(self) -> None:
        began = time.perf_counter()
        groups = settings(self._optimizer)
        for link in self._links:
            link.encode(self.steps)
        self._seconds.encode_s += time.perf_counter() - began
        for link in self._links:  # servers then work concurrently
            link.push(groups, self.steps)
        for link in self._links:
            link.take_answer(self.steps)
        self.dense_bytes += sum(link.dense_sent for link in self._links)

    def _for_each_link(self, act: Callable[[Link], None]) -> None:

        def each() -> None:
            for link in self._links:
                act(link)

        self._on_leader(each)

    def _on_leader(self, act: Callable[[], None]) -> None:
        failure: Exception | None = None
        if self._rank_context.servers:
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
        self._for_each_link(Link.pull)
        self._load()

    @property
    def rank(self) -> int:
        return self._rank_context.group

    def _identity(self) -> Identity:
        place = self._rank_context
        return identity(self._links[0].codec, self.layout, place.group, place.groups, self._seed)

    def state_dict(self) -> RankState:
        kept = {f"residual/{link.server}": link.residual.clone() for link in self._links if link.keeps}
        return RankState(**self._identity(), step=self.steps, tensors=label(kept, self._rank_context.group))

    def gathered(self, optimiser: Mapping[str, Any]) -> tuple[GatheredState, list[Any]]:
        raise StateError(
            "workers on servers cannot gather their states: use Replicator(checkpoints=folder) for the"
            " servers' state, and state_dict() for that of this worker"
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
        """Do nothing."""


def _must_match(config: Mapping[str, Any]) -> dict[str, str]:
    return {"the optimiser": str(config["class"]), "compressor=": str(config["compressor"])}


def _check_dtypes(names: Mapping[Tensor, str]) -> None:
    for each, name in names.items():
        if each.is_complex():
            raise AttachError(
                f"{name} is complex, but servers use float32: split it into two real parameters, or use"
                " 'sync' or 'local'"
            )
        if each.dtype == torch.float64:
            raise AttachError(
                f"{name} is float64, but servers use float32: call model.float() before creating the"
                " optimiser, or use 'sync' or 'local'"
            )
