"""RevocableExchange: where a step may fail after its exchange, and ranks come and go between steps.

A step that not every rank has finished is thrown away, and its batch's gradients with it. What the method
remembers of it has to go too: the memory is again what it was before. So each step keeps a copy of it.

Where the same ranks go on, each keeps its own memory. After any other change, each rank gets the mean of the
memories that there are, as `laconic.resize` makes it: ranks that hold none, as they have just come, get the
same one. So all agree on what all must have alike, and what the others had held back is not lost. It costs an
all-reduce of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.comm.comm import Comm
from laconic.comm.loopback import Loopback
from laconic.comm.metered import Meter, Metered
from laconic.core.errors import AttachError, StateError
from laconic.core.layout import Layout
from laconic.exchange.attached import Attached
from laconic.exchange.method import Method
from laconic.exchange.no_optimiser import NoOptimiser, refuse_optimised
from laconic.exchange.state import FORMAT, Identity, RankState, label, merged, model_digest, unlabel
from laconic.exchange.stats import Stats
from laconic.exchange.stopwatch import Seconds
from laconic.reducers.two_level import TwoLevel


@dataclass(frozen=True)
class Memory:
    """What a rank of a group of `size` remembers, as `Attached.state_dict` names it."""

    tensors: Mapping[str, Tensor]
    rank: int
    size: int


class RevocableExchange:
    """The exchange of one rank.

    Raises:
        AttachError: The method needs the optimiser, or groups within the group.
        SpecError: It does not suit the model.
    """

    def __init__(self, method: Method, layout: Layout, seed: int = 0) -> None:
        where = "where steps may be thrown away"
        refuse_optimised(method, where)
        if any(isinstance(route.reducer, TwoLevel) for route in method.routes):
            raise AttachError(
                f"{method} cannot go {where}: machines come and go, and it counts on them; take what goes"
                " between machines by itself, such as cgx(bits=4)"
            )
        self.method, self.layout, self.seed = method, layout, seed
        Attached(method, layout, Metered(Loopback.world(1)[0]), NoOptimiser())  # raises where it will not do
        self._seconds, self._dense, self._steps = Seconds(), 0, 0
        self._comm: Metered | None = None  # the group of the last step
        self._exchange: Attached | None = None
        self._before: Memory | None = None  # as it was when the last step began, and the number of that
        self._began = -1

    def begin(self, step: int, group: Comm | None, *, behind: bool) -> None:
        """A new step; all ranks of the group begin it.

        Args:
            step: How many steps have been finished. Unless that is one more than at the last call, the step
                that began then has been thrown away.
            group: The ranks, at the first call and where they have formed a new group since the last.
            behind: Whether this rank has just got another's model: what it remembers is of no use.
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
        if exchange is not self._exchange:  # only now: with a message that fails, nothing is lost
            self._comm, self._exchange, self._dense = comm, exchange, dense
        self._before, self._began = of(exchange), step
        exchange.begin()

    def mean_(self, bucket: Tensor, layout: Layout) -> str | None:
        """bucket float32 (n,) becomes the group's mean. If it cannot, the name of a tensor to blame."""
        exchange = self._working()
        exchange.mean_(bucket, layout)
        return exchange.void

    def end(self) -> None:
        """The last bucket of this step is done."""
        self._working().end()
        self._steps += 1

    def memory_at(self, step: int) -> Memory | None:
        """What counts where so many steps have been finished, before the next begins; None if nothing yet."""
        if self._exchange is not None and step == self._began + 1:
            return of(self._exchange)
        return self._before

    def stats(self) -> Stats:
        """Bytes and seconds of this rank since the start, with those of steps that were thrown away."""
        dense = self._dense + (0 if self._exchange is None else self._exchange.dense_bytes)
        meter = Meter() if self._comm is None else self._comm.snapshot()
        return Stats.of(meter, self._seconds, steps=self._steps, dense=dense)

    def state_dict(self, step: int) -> RankState:
        """This rank's memory where so many steps have been finished. Raises `StateError` before the first."""
        memory = self.memory_at(step)
        if memory is None:
            raise StateError("there is no memory to save before the first step: save after it")
        tensors = label(memory.tensors, memory.rank)
        return RankState(**self._identity(memory.rank, memory.size), step=step, tensors=tensors)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Begin with this memory. Raises `StateError` if a step has begun, or it is of another model."""
        if self._exchange is not None:
            raise StateError("a step has begun: load the state before the first backward pass")
        rank, size = (int(str(state.get(key, -1))) for key in ("rank", "size"))
        self._before = Memory(unlabel(state, self._identity(rank, size)), rank, size)

    def _identity(self, rank: int, size: int) -> Identity:
        return Identity(
            format=FORMAT,
            spec=repr(self.method),
            model=model_digest(self.layout),
            rank=rank,
            size=size,
            seed=self.seed,
        )

    def _bound(self, comm: Metered) -> Attached:
        """A new exchange, which remembers nothing."""
        return Attached(self.method, self.layout, comm, NoOptimiser(), self.seed, self._seconds)

    def _working(self) -> Attached:
        assert self._exchange is not None, "begin comes first"
        return self._exchange


def of(exchange: Attached) -> Memory:
    """A copy of what an exchange remembers."""
    tensors = {key: value.clone() for key, value in exchange.state_dict().items()}
    return Memory(tensors, exchange.comm.rank, exchange.comm.size)


def shared(memory: Memory | None, fresh: Attached, comm: Comm) -> Memory | None:
    """The memory of this rank in a new group, all of whose ranks call; None if no rank has any.

    `fresh`: an exchange of the new group, which says what there is to remember.
    """
    blank = fresh.state_dict()
    if not blank:
        return None
    if memory is not None and shapes(memory.tensors) != shapes(blank):
        memory = None
    place = (-1, -1) if memory is None else (memory.rank, memory.size)
    places = [
        tuple(each.tolist()) for each in comm.all_gather(torch.tensor(place, dtype=torch.int64, device="cpu"))
    ]
    having = [each for each in places if each != (-1, -1)]
    if not having or places == [(rank, comm.size) for rank in range(comm.size)]:
        return memory
    mine = blank if memory is None else memory.tensors
    tensors = {
        key: merged(key, mine[key], comm, len(having), mine=memory is not None) for key in sorted(blank)
    }
    return Memory(tensors, comm.rank, comm.size)


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What two memories of one method have alike."""
    return {key: (tuple(value.shape), value.dtype) for key, value in tensors.items()}
