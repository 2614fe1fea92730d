"""Measurements of links, a step and each method on real machines, stored as JSON. All ranks call it.

Links are measured in an all-reduce of all ranks, which includes the machines' own work.
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

from laconic.comm import wire_model
from laconic.comm.comm import Comm
from laconic.core.atomic_file import write_text
from laconic.core.errors import AttachError, StateError
from laconic.core.layout import Layout
from laconic.tools.plan.beside import probe_beside
from laconic.tools.plan.growth import Growth
from laconic.tools.plan.network import Network
from laconic.tools.plan.rehearsal import Rehearsed, Traffic
from laconic.tools.plan.step import Work, buckets

FEW = 8  # with more ranks, each is measured with the next only
LONG_S = 0.1  # duration of a message that measures the rate
MAX_BYTES = 1 << 26
ECHOES, STEPS, WARM = 15, 9, 3
FORMAT = 1


@dataclass(frozen=True)
class Pair:
    """Link between two ranks: seconds per message one way, and bytes per second each way."""

    first: int
    second: int
    latency_s: float
    bytes_a_second: float


@dataclass(frozen=True)
class Probe:
    size: int
    pairs: tuple[Pair, ...]
    network: Network
    work: Work
    layout: tuple[tuple[str, tuple[int, ...]], ...]
    methods: tuple[Rehearsed, ...] = ()

    def json(self) -> str:
        return json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n"

    def write(self, path: str | Path) -> None:
        """Write the file atomically: every rank may call this."""
        write_text(Path(path), self.json())

    @classmethod
    def read(cls, text: str) -> Probe:
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise StateError(f"it has version {fields['format']!r}, and this Laconic reads {FORMAT}")
        return cls(
            fields["size"],
            tuple(Pair(**each) for each in fields["pairs"]),
            Network(**fields["network"]),
            _work(fields["work"]),
            tuple((name, tuple(shape)) for name, shape in fields["layout"]),
            tuple(_rehearsed(each) for each in fields["methods"]),
        )

    @classmethod
    def load(cls, path: Path) -> Probe:
        try:
            return cls.read(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise StateError(f"there is no file {path}; laconic probe -o {path} writes one") from None
        except OSError as error:
            why = f"cannot read {path}: {error.strerror}; laconic probe -o FILE writes one"
            raise StateError(why) from None
        except StateError as error:
            why = str(error)
        except (json.JSONDecodeError, UnicodeDecodeError):
            why = "it is no JSON" if path.stat().st_size else "it is empty"
        except (ValueError, KeyError, TypeError, AttributeError):
            why = "what a probe measures is not in it"
        raise StateError(f"{path} is not a file of laconic probe: {why}; laconic probe -o FILE writes one")


def _work(fields: dict[str, Any]) -> Work:
    return Work(**(fields | {"buckets": tuple(fields["buckets"]), "ready": tuple(fields["ready"])}))


def _rehearsed(fields: dict[str, Any]) -> Rehearsed:
    def growth(each: dict[str, Any]) -> Growth:
        first, second, third, fourth = each["parts"]
        return Growth((first, second, third, fourth))

    traffic = {
        kind: Traffic(growth(each["calls"]), growth(each["nbytes"]))
        for kind, each in fields["traffic"].items()
    }
    coding = growth(fields["encode_s"]), growth(fields["decode_s"])
    return Rehearsed(
        fields["spec"], traffic, *coding, fields.get("when", "backward"), fields.get("spread", 0.0)
    )


def probe_pairs(comm: Comm) -> tuple[Pair, ...]:
    size = comm.size
    if size <= FEW:
        ends = [(first, second) for first in range(size) for second in range(first + 1, size)]
    else:
        ends = [(rank, (rank + 1) % size) for rank in range(size)]
    return tuple(_pair(comm, first, second) for first, second in ends)


def _pair(comm: Comm, first: int, second: int) -> Pair:
    peer_of = {first: second, second: first}
    peers = [peer_of[comm.rank]] if comm.rank in peer_of else []

    def both_ways(nbytes: int) -> float:
        sends = {peer: torch.empty(nbytes, dtype=torch.uint8, device="cpu") for peer in peers}
        recvs = {peer: torch.empty(nbytes, dtype=torch.uint8, device="cpu") for peer in peers}
        meet(comm)
        start = time.perf_counter()
        comm.exchange(sends, recvs)
        return largest(comm, time.perf_counter() - start if peers else 0.0)

    latency_s = median([both_ways(8) for _ in range(ECHOES)][WARM:])
    nbytes = 1 << 16
    while (long_s := min(both_ways(nbytes), both_ways(nbytes))) < LONG_S and nbytes < MAX_BYTES:
        nbytes *= 4
    return Pair(first, second, latency_s, nbytes / max(long_s - latency_s, 1e-9))


def probe_network(comm: Comm) -> Network:
    """Measure the link while all ranks send; equal on all. Collective."""
    passed = 2 * (comm.size - 1) / comm.size

    def seconds(nbytes: int) -> float:
        x = torch.zeros(nbytes // 4, dtype=torch.float32, device="cpu")
        meet(comm)
        start = time.perf_counter()
        comm.all_reduce(x)
        return largest(comm, time.perf_counter() - start)

    short = 4 * comm.size
    latency_s = median([seconds(short) for _ in range(ECHOES)][WARM:]) / wire_model.rounds(short, comm.size)
    nbytes = 1 << 18
    while (long_s := min(seconds(nbytes), seconds(nbytes))) < LONG_S and nbytes < MAX_BYTES:
        nbytes *= 4
    waited_s = wire_model.rounds(nbytes, comm.size) * latency_s
    return probe_beside(comm, Network(passed * nbytes / max(long_s - waited_s, 1e-9), latency_s))


def probe_work(
    model: nn.Module, loss: Callable[[], Tensor], optimizer: Optimizer, comm: Comm, cores: float
) -> Work:
    """Measure a step's parts and when buckets are ready: medians, on the slowest rank."""
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
    middle = torch.tensor(rows[WARM:], dtype=torch.float64, device="cpu").median(dim=0).values
    forward_s, backward_s, update_s, *ready = comm.all_reduce(middle, "max").tolist()
    return Work(forward_s, backward_s, update_s, cut, cores, tuple(min(each, 1.0) for each in ready))


def _ready(
    trained: Sequence[nn.Parameter],
    ends: dict[nn.Parameter, float],
    start: float,
    backward_s: float,
    cut: Sequence[int],
) -> list[float]:
    if not any(each in ends for each in trained):
        raise AttachError(
            "no trained parameter of this model has had a gradient, so no step can be measured: check that"
            " the loss depends on what the optimiser trains"
        )
    ready = sorted(((ends[each] - start) / backward_s, 4 * each.numel()) for each in trained if each in ends)
    found, filled, reached = [], 0, 0
    for nbytes in cut:
        reached += nbytes
        while ready and filled < reached:
            at, more = ready.pop(0)
            filled += more
        found.append(at)
    return found


def layout_of(model: nn.Module) -> Layout:
    return Layout.of(
        (name, tuple(each.shape)) for name, each in model.named_parameters() if each.requires_grad
    )


def largest(comm: Comm, value: float) -> float:
    return float(comm.all_reduce(torch.tensor([value], dtype=torch.float64, device="cpu"), "max"))


def meet(comm: Comm) -> None:
    comm.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"))
