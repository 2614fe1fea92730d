"""TransactionalExchange: an exchange whose steps can be rolled back, among ranks that may change.

The memory before a step that not every rank has finished is restored from a copy. After a change of the
group, each rank gets the mean of the existing memories, as from `laconic.resize`: no residual is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.gather_text import gather_numbers
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Meter, Metered
from laconic.core.errors import AttachError, StateError
from laconic.core.layout import Layout
from laconic.exchange.attached import Attached
from laconic.exchange.method import Method
from laconic.exchange.no_optimiser import NoOptimiser, refuse_optimised
from laconic.exchange.state import Identity, RankState, identity, label, merged, unlabel
from laconic.exchange.stats import Stats
from laconic.exchange.stopwatch import Seconds
from laconic.reducers.two_level import TwoLevel


@dataclass(frozen=True)
class Memory:
    tensors: Mapping[str, Tensor]
    rank: int
    size: int


class TransactionalExchange:
    """Exchange of one rank.

    Raises `AttachError` for a method that needs the optimiser, or groups within the group, and `SpecError`
    for one that does not suit the model.
    """

    def __init__(self, method: Method, layout: Layout, seed: int = 0) -> None:
        where = "where steps may be thrown away"
        refuse_optimised(method, where)
        if any(isinstance(route.reducer, TwoLevel) for route in method.routes):
            raise AttachError(
                f"{method} cannot be used {where}: it depends on the machines, which may change; use its"
                " method between machines alone, such as cgx(bits=4)"
            )
        self.method, self.layout, self.seed = method, layout, seed
        alone = Metered(Loopback.world(1)[0])
        Attached(method, layout, alone, NoOptimiser())  # checks the method
        self._seconds, self._dense, self._steps = Seconds(), 0, 0
        self._comm: Metered | None = None
        self._exchange: Attached | None = None
        self._before: Memory | None = None
        self._began = -1

    def begin(self, step: int, group: Comm | None, *, behind: bool) -> None:
        """Start a step, on all ranks of the group.

        Args:
            step: Number of finished steps; unless it is one more than before, the last step was dropped.
            group: The ranks, at the first call and after a change.
            behind: Whether this rank has another rank's model: its memory is invalid.
        """
        memory = None if behind else self.memory_at(step)
        comm, exchange, dense = self._comm, self._exchange, self.stats().dense
        if group is not None:
            comm = Metered(group) if comm is None else comm.over(group)
            exchange = self._bound(comm)
            memory = shared(memory, exchange, comm)
        assert comm is not None and exchange is not None, "the first step has a group"
        if group is None and behind:
            memory = of(self._bound(comm))
        if memory is not None:
            exchange.load_state_dict(memory.tensors, step)
        exchange.step = step
        if exchange is not self._exchange:  # last: nothing is lost if a message fails
            self._comm, self._exchange, self._dense = comm, exchange, dense
        self._before, self._began = of(exchange), step
        exchange.begin()

    def mean_(self, bucket: Tensor, layout: Layout) -> str | None:
        """Replace bucket float32 (n,) by the group's mean, or return a non-finite tensor's name."""
        exchange = self._working()
        exchange.mean_(bucket, layout)
        return exchange.skip_reason

    def end(self) -> None:
        self._working().end()
        self._steps += 1

    def memory_at(self, step: int) -> Memory | None:
        if self._exchange is not None and step == self._began + 1:
            return of(self._exchange)
        return self._before

    def stats(self) -> Stats:
        dense = self._dense + (0 if self._exchange is None else self._exchange.dense_bytes)
        meter = Meter() if self._comm is None else self._comm.snapshot()
        return Stats.of(meter, self._seconds, steps=self._steps, dense=dense)

    def state_dict(self, step: int) -> RankState:
        """Return this rank's memory after `step` steps. Raises `StateError` before the first."""
        memory = self.memory_at(step)
        if memory is None:
            raise StateError("there is no memory to save before the first step: save after it")
        tensors = label(memory.tensors, memory.rank)
        return RankState(**self._identity(memory.rank, memory.size), step=step, tensors=tensors)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load a memory. Raises `StateError` if a step has begun, or for another model."""
        if self._exchange is not None:
            raise StateError("a step has begun: load the state before the first backward pass")
        rank, size = (int(str(state.get(key, -1))) for key in ("rank", "size"))
        self._before = Memory(unlabel(state, self._identity(rank, size)), rank, size)

    def _identity(self, rank: int, size: int) -> Identity:
        return identity(self.method, self.layout, rank, size, self.seed)

    def _bound(self, comm: Metered) -> Attached:
        return Attached(self.method, self.layout, comm, NoOptimiser(), self.seed, self._seconds)

    def _working(self) -> Attached:
        assert self._exchange is not None, "begin comes first"
        return self._exchange


def of(exchange: Attached) -> Memory:
    tensors = {key: value.clone() for key, value in exchange.state_dict().items()}
    return Memory(tensors, exchange.comm.rank, exchange.comm.size)


def shared(memory: Memory | None, fresh: Attached, comm: Comm) -> Memory | None:
    """Return this rank's memory in a new group, or None if no rank has any. Call it on all ranks."""
    blank = fresh.state_dict()
    if not blank:
        return None
    if memory is not None and shapes(memory.tensors) != shapes(blank):
        memory = None
    place = (-1, -1) if memory is None else (memory.rank, memory.size)
    places = gather_numbers(comm, *place)
    having = [each for each in places if each != (-1, -1)]
    if not having or places == [(rank, comm.size) for rank in range(comm.size)]:
        return memory
    mine = blank if memory is None else memory.tensors
    tensors = {
        key: merged(key, mine[key], comm, len(having), mine=memory is not None) for key in sorted(blank)
    }
    return Memory(tensors, comm.rank, comm.size)


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {key: (tuple(value.shape), value.dtype) for key, value in tensors.items()}
