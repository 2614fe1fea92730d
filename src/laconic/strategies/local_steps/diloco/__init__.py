"""DiLoCo: local steps, and an outer Nesterov SGD whose gradient is the mean of the ranks' changes.

    x_i <- LocalOpt(x_i, g_i)              at every step
    d = mean_j (x - x_j)                   every `every` steps; x: the model at which all were last equal
    v <- momentum v + d                    `overlap` steps later, while d is being sent
    x <- x - lr (d + momentum v);  x_i <- mix x_i + (1 - mix) x

Douillard et al. 2023, arXiv:2311.08105; as in torchft and PrimeIntellect's OpenDiLoCo. The local optimiser
keeps its state. With lr=1, momentum=0 it is `local_sgd`.

`fragments`, `overlap` and `mix` are Streaming DiLoCo: Douillard et al. 2025, arXiv:2501.18512, as in torchft.
Ours: tensors are assigned to fragments by size, not layers.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.codecs.dense import Dense
from laconic.comm.comm import Comm
from laconic.comm.communication_thread import Answer, CommunicationThread
from laconic.comm.metered import Metered
from laconic.core.arguments import number, whole
from laconic.core.errors import NonFiniteError, PeerError
from laconic.core.layout import Layout
from laconic.core.spec import Status
from laconic.strategies.local_steps import Outer, outer_method
from laconic.strategies.local_steps.diloco.fragments import Fragment, fragments_of
from laconic.strategies.replica import Replica
from laconic.strategies.strategy import BoundStrategy, Notes, Strategy, Update

ADVICE = (
    "%s: ranks train alone between outer steps. For the accuracy of data parallel training"
    " plan up to twice its steps, or set a smaller every="
)

log = logging.getLogger("laconic")


@dataclass(frozen=True, repr=False)
class DiLoCo(Strategy):
    """Nesterov SGD on the outer gradient d, every `every` steps, for each fragment.

    Over many rounds the model moves by up to lr / (1 - momentum) times the ranks' changes: 7 with the paper's
    momentum of 0.9.

    Wire, every `every` steps: that of `compressor` for one gradient, 4 n bytes if dense; one fragment at a
    time. Memory: 2 n float32, and that of `compressor`.

    Args:
        every: Steps between outer steps, 1 or more; default: 100.
        lr: Outer learning rate, above 0; default: 0.7.
        momentum: Outer Nesterov momentum, in [0, 1); default: 0.5.
        compressor: Sends d: a codec, selector, reducer or method, with error feedback if biased; default:
            dense(). logquant(levels=7) has the paper's 4 bits.
        fragments: Parts of the model, sent in order, `every` / `fragments` steps apart, 1 to `every`;
            default: 1.
        overlap: Inner steps during an exchange, 0 to `every` - 1; default: 0, all ranks wait.
        mix: Share of a rank's own parameters after an outer step, in [0, 1); default: 0. The paper uses 0.5
            with an overlap.

    Raises:
        SpecError: An argument is outside its range, or `compressor` changes the optimiser.
    """

    every: int = 100
    lr: float = 0.7
    momentum: float = 0.5
    compressor: Any = field(default_factory=Dense)
    fragments: int = 1
    overlap: int = 0
    mix: float = 0.0

    name: ClassVar[str] = "diloco"
    paper: ClassVar[str] = "Douillard et al. 2023, arXiv:2311.08105"
    status: ClassVar[Status] = "verified"
    code: ClassVar[str] = "meta-pytorch/torchft"
    examples: ClassVar[tuple[str, ...]] = (
        "diloco()",
        "diloco(every=500, compressor=minmax(bits=8))",
        "diloco(every=30, fragments=2, overlap=3, mix=0.5, compressor=scatter_reduce(logquant(levels=7)))",
    )

    def __post_init__(self) -> None:
        whole("diloco: every", self.every, 1)
        number("diloco: lr", self.lr, above=0)
        number("diloco: momentum", self.momentum, least=0, below=1)
        whole(
            "diloco: fragments", self.fragments, 1, self.every, "each has an outer step every `every` steps"
        )
        whole("diloco: overlap", self.overlap, 0, self.every - 1, "the next outer step begins after that")
        number("diloco: mix", self.mix, least=0, below=1)
        outer_method(self.compressor)

    @property
    def period(self) -> int:
        return self.every

    @property
    def meets(self) -> bool:
        return self.fragments == 1 and not self.overlap and not self.mix

    @property
    def overlaps(self) -> bool:
        return self.overlap > 0

    def bind(self, replica: Replica, optimizer: Optimizer, comm: Metered, seed: int = 0) -> BoundDiLoCo:
        bound = BoundDiLoCo(self, replica, comm, seed)
        if comm.rank == 0 and comm.size > 1:
            log.info(ADVICE, self)
        return bound


@dataclass(frozen=True)
class OnItsWay:
    """Outer gradient that is being averaged, to apply after step `due`.

    `errors`: the error that makes all ranks skip it. The thread continues, as a script can load a state.
    """

    fragment: Fragment
    mean: Answer
    due: int
    errors: list[NonFiniteError]


class BoundDiLoCo(BoundStrategy):
    """DiLoCo on one rank. `velocity` v float32 (n,) is equal on all ranks.

    `rounds`: exchanges started, one per fragment and outer step.
    """

    def __init__(self, config: DiLoCo, replica: Replica, comm: Metered, seed: int) -> None:
        super().__init__(replica, comm)
        self.config = config
        self.rounds = 0
        self.velocity = torch.zeros_like(replica.flat)
        self._outer = Outer(replica, comm, config.compressor, seed, self.seconds)
        self._fragments = tuple(fragments_of(replica.layout, config.fragments, config.every))
        self._under_way: deque[OnItsWay] = deque()
        self._fifo: CommunicationThread | None = None
        if config.overlap:
            self._fifo = CommunicationThread(f"outer steps of rank {comm.rank}", replica.flat.device)

    def step_(self, update: Update, loss: float | None) -> None:
        update()
        done = self.steps + 1
        while self._under_way and self._under_way[0].due <= done:
            self._arrive()
        for fragment in self._fragments:
            if fragment.is_due(done, self.config.every):
                self._send(fragment, done)

    def _send(self, fragment: Fragment, steps: int) -> None:
        gradient = fragment.take(self._outer.anchor) - fragment.take(self.replica.flat)
        if self._fifo is None:
            self._apply(fragment, self._outer.mean_(gradient, fragment.layout))
        else:
            errors: list[NonFiniteError] = []
            mean = self._fifo.submit(partial(self._mean, gradient, fragment.layout, errors))
            self._under_way.append(OnItsWay(fragment, mean, steps + self.config.overlap, errors))
        self.rounds += 1

    def _mean(self, gradient: Tensor, layout: Layout, errors: list[NonFiniteError]) -> Tensor:
        try:
            return self._outer.mean_(gradient, layout)
        except NonFiniteError as error:
            errors.append(error)
            return gradient

    def _arrive(self) -> None:
        oldest = self._under_way.popleft()
        try:
            mean = oldest.mean.wait()
        except RuntimeError as error:
            raise PeerError(str(error)) from error
        if oldest.errors:
            raise oldest.errors[0]
        self._apply(oldest.fragment, mean)

    def _apply(self, fragment: Fragment, gradient: Tensor) -> None:
        self.replica.rest_(self.velocity)
        velocity = fragment.take(self.velocity).mul_(self.config.momentum).add_(gradient)
        step = gradient.add(velocity, alpha=self.config.momentum)
        model = fragment.take(self._outer.anchor).sub_(step, alpha=self.config.lr)
        fragment.put_(self.velocity, velocity)
        fragment.put_(self._outer.anchor, model)
        if self.config.mix:
            model = model.lerp(fragment.take(self.replica.flat), self.config.mix)
        fragment.put_(self.replica.flat, model)

    def drain(self, side_comm: Comm) -> None:
        errors: list[NonFiniteError] = []
        while self._under_way:
            try:
                self._arrive()
            except NonFiniteError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def consensus(self, side_comm: Comm) -> Tensor:
        if not self._under_way:
            return super().consensus(side_comm)
        live = (self._outer.anchor, self.velocity, self.replica.flat)
        copies, under_way = [each.clone() for each in live], self._under_way.copy()
        try:
            self.drain(side_comm)
            return super().consensus(side_comm)
        finally:
            self._under_way = under_way
            for each, copy in zip(live, copies, strict=True):
                each.copy_(copy)

    def agreed(self) -> dict[str, Tensor]:
        return {"velocity": self.velocity}

    def adopt_(self, model: Tensor) -> None:
        self._outer.restart_(model)

    def notes(self) -> Notes:
        return {"rounds": self.rounds}

    def state_dict(self) -> dict[str, Tensor]:
        return {"velocity": self.velocity} | self._outer.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], steps: int) -> None:
        self.rounds = sum(each.begun(steps, self.config.every) for each in self._fragments)
        self.velocity.copy_(state["velocity"])
        self._outer.load_state_dict(state, self.rounds)
        self.steps = steps

    def close(self) -> None:
        if self._fifo is not None:
            self._fifo.end()
