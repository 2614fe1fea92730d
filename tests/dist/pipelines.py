"""A small net cut in stages, its data, and what a rank does with it: for the tests of pipelines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.core.errors import LaconicError
from laconic.pipeline.compress import TESTED as TESTED_WITH
from tests.dist.runs import everywhere

TESTED = pytest.mark.skipif(
    not TESTED_WITH[0] <= tuple(map(int, torch.__version__.split(".")[:2])) <= TESTED_WITH[1],
    reason="pipelines are refused with this version of torch",
)
CHANGE = {"forward": "change(minmax(bits=4))", "samples": 16}
WIDE, LONG, SAMPLES, MICROS = 16, 6, 16, 4  # two batches of 8 are an epoch
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")
ROOM = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}  # stages on a rank


def block(index: int) -> nn.Module:
    """One stage: equal wherever it is made."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 + index)
        return Residual(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE)))


class Residual(nn.Module):
    """x + inner(x): zero-bubble schedules refuse stages whose output is a view, as a linear layer's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def data() -> tuple[Tensor, Tensor]:
    """Inputs and targets (samples, long, wide)."""
    rng = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, LONG, WIDE, generator=rng), torch.randn(SAMPLES, LONG, WIDE, generator=rng)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def indices_of(kind: str, rank: int, size: int) -> list[int]:
    """This rank's stages."""
    if kind == "ZBVZeroBubble":
        return [rank, 2 * size - 1 - rank]
    return [rank + size * turn for turn in range(ROOM[kind])]


class Pipeline:
    """This rank's part of a pipeline, and its optimiser."""

    def __init__(
        self, kind: str = "GPipe", make: Callable[[int], nn.Module] = block, micros: int = MICROS
    ) -> None:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.count = self.size * ROOM[kind]
        self.indices = indices_of(kind, self.rank, self.size)
        self.modules = [make(index) for index in self.indices]
        device = torch.device("cpu")
        self.stages = [
            PipelineStage(module, index, self.count, device)
            for index, module in zip(self.indices, self.modules, strict=True)
        ]
        given = self.stages if ROOM[kind] > 1 else self.stages[0]
        self.schedule: Any = get_schedule_class(kind)(given, micros, loss_fn=loss_fn)
        self.parameters = [each for module in self.modules for each in module.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05, momentum=0.9)

    @property
    def first(self) -> bool:
        return 0 in self.indices

    @property
    def last(self) -> bool:
        return self.count - 1 in self.indices

    def train(
        self,
        ids: Tensor,
        step: Callable[..., Any] | None = None,
        x: Tensor | None = None,
        optimise: bool = True,
    ) -> float | None:
        """One step on these samples; the loss, on the last stage's rank."""
        inputs, targets = data()
        losses: list[Tensor] = []
        (step or self.schedule.step)(
            *([inputs[ids] if x is None else x] if self.first else []),
            **({"target": targets[ids], "losses": losses} if self.last else {}),
        )
        if optimise:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return torch.stack(losses).mean().item() if self.last else None

    def evaluate(self, ids: Tensor) -> None:
        """Forward alone."""
        inputs, targets = data()
        self.schedule.eval(
            *([inputs[ids]] if self.first else []), **({"target": targets[ids]} if self.last else {})
        )

    @property
    def weights(self) -> Tensor:
        return torch.cat([each.detach().flatten() for each in self.parameters])


def order(step: int, batch: int = 8) -> Tensor:
    """The ids of a step: shuffled anew in each epoch."""
    steps = SAMPLES // batch
    rng = torch.Generator().manual_seed(step // steps)
    return torch.randperm(SAMPLES, generator=rng)[step % steps * batch :][:batch]


def compressed(pipeline: Pipeline, options: dict[str, Any], exact: bool = False) -> Any:
    """Its handle. `exact`: with messages of the length that both sides name, as on NCCL."""
    handle = laconic.pipeline.compress(pipeline.schedule, **options)
    if exact:
        handle._exact = True
        for links in handle.links:
            links.exact = True
    return handle


def trained(
    kind: str, steps: int, exact: bool = False, **options: Any
) -> tuple[Tensor, list[float | None], Any]:
    """Weights, losses and the handle after some steps; torch's own pipeline without options."""
    pipeline = Pipeline(kind)
    handle = compressed(pipeline, options, exact) if options else None
    losses = []
    for step in range(steps):
        ids = order(step)
        if handle is not None:
            handle.samples = ids
        losses.append(pipeline.train(ids))
    return pipeline.weights, losses, handle


@contextmanager
def metered() -> Iterator[Counter[str]]:
    """Bytes that torch's schedules hand to the process group meanwhile, and offer it for what comes."""
    from torch.distributed.pipelining import schedules

    counter: Counter[str] = Counter()
    plain = schedules._batch_p2p

    def counting(ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
        for op in ops:
            counter["sent" if op.op is dist.isend else "received"] += op.tensor.nbytes
        return plain(ops, desc)

    schedules._batch_p2p = counting
    try:
        yield counter
    finally:
        schedules._batch_p2p = plain


def check_sides(ranks: list[dict[str, str]]) -> None:
    """Each boundary has two sides on two ranks, which are equal."""
    both: dict[str, list[str]] = {}
    for digests in ranks:
        for name, digest in digests.items():
            both.setdefault(name.split()[0], []).append(digest)
    assert both
    for name, pair in both.items():
        assert len(pair) == 2 and pair[0] == pair[1] != "", name


def told(call):
    """The error that a call raises, as its class and words."""
    try:
        call()
    except (LaconicError, OSError) as error:
        return type(error).__name__, str(error)
    return None


def agree_on_sides(handle):
    """Check on all ranks that both sides of each boundary are equal."""
    check_sides(everywhere(handle.digests()))


def begun(kind="GPipe", exact=False, make=block, **options):
    """A pipeline and its handle; by default changes cross in 4 bits."""
    pipeline = Pipeline(kind, make=make)
    return pipeline, compressed(pipeline, options or CHANGE, exact)


def stepped(pipeline, handle, ids, given=None):
    """The error of a step on these samples; `given`: the ids that this rank names."""
    handle.samples = ids if given is None else given
    said = told(lambda: pipeline.train(ids))
    if said is not None:
        pipeline.optimizer.zero_grad()
    return said
