"""A probe of the real thing: links, a step's computing, and what each method asks, measured and kept as JSON.

All ranks of a group call it together. Links: one message there and back, and longer ones until they take a
tenth of a second, both ways at once, pair by pair; then all ranks at once in an all-reduce, which is what the
planner reckons with, as it holds what the machines have to do for their links; and once more while they
compute (see `beside`). Computing: all ranks at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.comm import link
from laconic.comm.comm import Comm
from laconic.core.errors import StateError
from laconic.core.layout import Layout
from laconic.plan.beside import probe_beside
from laconic.plan.growth import Growth
from laconic.plan.network import Network
from laconic.plan.rehearsal import Rehearsed, Traffic
from laconic.plan.step import Work, buckets

FEW = 8  # ranks of which all pairs are tried; of more, each with the next
LONG_S = 0.1  # that a message should take for its rate to be known
LARGEST = 1 << 26  # bytes of a message
ECHOES, STEPS, WARM = 15, 9, 3
FORMAT = 1  # of the file


@dataclass(frozen=True)
class Pair:
    """The link between two ranks: seconds of a message one way, and bytes a second each way."""

    first: int
    second: int
    latency_s: float
    bytes_a_second: float


@dataclass(frozen=True)
class Probe:
    """What was measured among `size` workers. `layout`: names and shapes of the model's tensors."""

    size: int
    pairs: tuple[Pair, ...]
    network: Network
    work: Work
    layout: tuple[tuple[str, tuple[int, ...]], ...]
    methods: tuple[Rehearsed, ...] = ()

    def json(self) -> str:
        """What `load` reads."""
        return json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> Probe:
        """Read a file of `json`. Raises `StateError` for another file."""
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            if told.pop("format") != FORMAT:
                raise ValueError("it is of another version")
            return cls(
                told["size"],
                tuple(Pair(**each) for each in told["pairs"]),
                Network(**told["network"]),
                _work(told["work"]),
                tuple((name, tuple(shape)) for name, shape in told["layout"]),
                tuple(_rehearsed(each) for each in told["methods"]),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(f"{path} is no file that laconic probe wrote: {error}") from None


def _work(told: dict[str, Any]) -> Work:
    return Work(**(told | {"buckets": tuple(told["buckets"]), "ready": tuple(told["ready"])}))


def _rehearsed(told: dict[str, Any]) -> Rehearsed:
    def growth(each: dict[str, Any]) -> Growth:
        first, second, third, fourth = each["parts"]
        return Growth((first, second, third, fourth))

    traffic = {
        kind: Traffic(growth(each["calls"]), growth(each["nbytes"])) for kind, each in told["traffic"].items()
    }
    return Rehearsed(told["spec"], traffic, growth(told["encode_s"]), growth(told["decode_s"]))


def probe_pairs(comm: Comm) -> tuple[Pair, ...]:
    """The links between ranks, one after the other; the same on all ranks."""
    size = comm.size
    if size <= FEW:
        ends = [(first, second) for first in range(size) for second in range(first + 1, size)]
    else:
        ends = [(rank, (rank + 1) % size) for rank in range(size)]
    return tuple(_pair(comm, first, second) for first, second in ends)


def _pair(comm: Comm, first: int, second: int) -> Pair:
    """Latency and rate of one link. All ranks call this, as they do every collective; two of them send."""
    others = {first: second, second: first}
    peers = [others[comm.rank]] if comm.rank in others else []

    def both(nbytes: int) -> float:
        sends = {peer: torch.empty(nbytes, dtype=torch.uint8) for peer in peers}
        recvs = {peer: torch.empty(nbytes, dtype=torch.uint8) for peer in peers}
        meet(comm)
        began = time.perf_counter()
        comm.exchange(sends, recvs)
        return agreed(comm, time.perf_counter() - began if peers else 0.0)

    latency_s = median([both(8) for _ in range(ECHOES)][WARM:])
    nbytes = 1 << 16
    while (taken := min(both(nbytes), both(nbytes))) < LONG_S and nbytes < LARGEST:
        nbytes *= 4
    return Pair(first, second, latency_s, nbytes / max(taken - latency_s, 1e-9))


def probe_network(comm: Comm) -> Network:
    """Latency and rate of all links when all ranks send at once; the same on all ranks. Of 2 and more."""
    passed = 2 * (comm.size - 1) / comm.size

    def seconds(nbytes: int) -> float:
        x = torch.zeros(nbytes // 4)
        meet(comm)
        began = time.perf_counter()
        comm.all_reduce(x)
        return agreed(comm, time.perf_counter() - began)

    short = 4 * comm.size
    latency_s = median([seconds(short) for _ in range(ECHOES)][WARM:]) / link.rounds(short, comm.size)
    nbytes = 1 << 18
    while (taken := min(seconds(nbytes), seconds(nbytes))) < LONG_S and nbytes < LARGEST:
        nbytes *= 4
    waited_s = link.rounds(nbytes, comm.size) * latency_s
    return probe_beside(comm, Network(passed * nbytes / max(taken - waited_s, 1e-9), latency_s))


def probe_work(
    model: nn.Module, loss: Callable[[], Tensor], optimizer: Optimizer, comm: Comm, cores: float
) -> Work:
    """Seconds of a step's parts, and when backward makes each bucket ready: medians, of the slowest rank."""
    ends: dict[nn.Parameter, float] = {}

    def note(parameter: nn.Parameter) -> None:
        ends[parameter] = time.perf_counter()

    trained = [each for each in model.parameters() if each.requires_grad]
    hooks = [each.register_post_accumulate_grad_hook(note) for each in trained]  # type: ignore[no-untyped-call]
    rows = []
    for _ in range(WARM + STEPS):
        meet(comm)
        clock = [time.perf_counter()]
        value = loss()
        clock.append(time.perf_counter())
        value.backward()  # type: ignore[no-untyped-call]
        clock.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        clock.append(time.perf_counter())
        parts = [later - sooner for sooner, later in pairwise(clock)]
        cut = buckets(sum(4 * each.numel() for each in trained))
        rows.append(parts + _ready(trained, ends, clock[1], parts[1], cut))
    for hook in hooks:
        hook.remove()
    middle = torch.tensor(rows[WARM:], dtype=torch.float64).median(dim=0).values
    forward_s, backward_s, update_s, *ready = comm.all_reduce(middle, "max").tolist()
    return Work(forward_s, backward_s, update_s, cut, cores, tuple(min(each, 1.0) for each in ready))


def _ready(
    trained: Sequence[nn.Parameter],
    ends: dict[nn.Parameter, float],
    began: float,
    backward_s: float,
    cut: Sequence[int],
) -> list[float]:
    """When the gradients of each bucket are all there, as parts of backward."""
    came = sorted(((ends[each] - began) / backward_s, 4 * each.numel()) for each in trained if each in ends)
    found, filled, reached = [], 0, 0
    for nbytes in cut:
        reached += nbytes
        while came and filled < reached:
            at, more = came.pop(0)
            filled += more
        found.append(at)
    return found


def layout_of(model: nn.Module) -> Layout:
    """The trained tensors of a model."""
    return Layout.of(
        (name, tuple(each.shape)) for name, each in model.named_parameters() if each.requires_grad
    )


def agreed(comm: Comm, value: float) -> float:
    """The largest of all ranks'."""
    return float(comm.all_reduce(torch.tensor([value], dtype=torch.float64), "max"))


def meet(comm: Comm) -> None:
    """No rank leaves before all have come."""
    comm.all_reduce(torch.zeros(1))
