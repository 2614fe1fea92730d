"""Rehearsal: a method exchanges gradients in small groups of threads, and its cost is recorded.

Messages are counted, computing is timed, and `Growth` extrapolates both. Seconds are CPU time of a rank's
thread, and only one rank computes at a time: other load and shared caches do not matter.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Literal, TypeVar

import torch

from laconic.comm.loopback import Loopback
from laconic.comm.metered import Metered
from laconic.core.errors import SpecError
from laconic.core.layout import Layout
from laconic.exchange.attached import Attached
from laconic.exchange.method import Method
from laconic.tools.plan.growth import Growth
from laconic.tools.plan.in_step import InStep
from laconic.tools.plan.stage import Gradients, InTurn, Watch

SIZES = (2, 4, 8)
STEPS = 3  # per group; the first is not counted
MAX_ELEMENTS = 1 << 23  # a larger model rehearses with some of its tensors
STEADY, PLAYS = 0.1, 3  # accepted spread, and most rehearsals to reach it
CLOCK = 0.3  # allowed relative error of the fitted seconds

T = TypeVar("T")
When = Literal["backward", "in step", "after update", "next step"]


@dataclass(frozen=True)
class Traffic:
    calls: Growth
    nbytes: Growth


@dataclass(frozen=True)
class Rehearsed:
    """Cost of exchanging a whole model for one worker.

    `traffic`: by collective; `encode_s`: before the first message; `decode_s`: later; `spread`: relative
    deviation of computing time between rehearsals.
    """

    spec: str
    traffic: Mapping[str, Traffic]
    encode_s: Growth
    decode_s: Growth
    when: When = "backward"
    spread: float = 0.0

    def scaled(self, factor: float) -> Rehearsed:
        return replace(self, encode_s=self.encode_s * factor, decode_s=self.decode_s * factor)

    def nbytes(self, size: int) -> float:
        return sum(each.nbytes.at(size) for each in self.traffic.values())


def rehearse(methods: Iterable[Method], layout: Layout, sizes: Sequence[int] = SIZES) -> Iterator[Rehearsed]:
    """Yield each method's cost after its warm-up, with a thread per worker; large models are excerpted.

    Raises `SpecError` if a method adapts to the link.
    """
    methods, part = list(methods), excerpt(layout)
    if adaptive := next((method for method in methods if method.adaptive), None):
        raise SpecError(
            f"{adaptive} adapts to the link, so a rehearsal cannot tell what it will send: leave it out;"
            " the advice of this plan follows the same rule, with one method for all buckets"
        )
    gradients = Gradients(part)
    for method in methods:
        played = {size: steadily(partial(play, method, part, size, gradients)) for size in sizes}
        in_step = any(rule.exchanges_in_step for rule in method.rules)
        when: When = "in step" if in_step else "backward"
        yield fitted(repr(method), played, layout.numel / part.numel, when)


def fitted(spec: str, played: Mapping[int, Played], scale: float, when: When = "backward") -> Rehearsed:
    kinds = sorted({kind for each in played.values() for kind in each.calls})
    traffic = {
        kind: Traffic(
            Growth.fit({size: each.calls.get(kind, 0.0) for size, each in played.items()}),
            Growth.fit({size: each.nbytes.get(kind, 0.0) for size, each in played.items()}) * scale,
        )
        for kind in kinds
    }
    encode_s = Growth.fit({size: each.encode_s for size, each in played.items()}, CLOCK)
    decode_s = Growth.fit({size: each.decode_s for size, each in played.items()}, CLOCK)
    spread = max(each.spread for each in played.values())
    return Rehearsed(spec, traffic, encode_s * scale, decode_s * scale, when, spread)


def excerpt(layout: Layout, max_elements: int = MAX_ELEMENTS) -> Layout:
    """Return a layout of at most `max_elements`: the first, the last and every k-th tensor, some shortened.

    >>> excerpt(Layout.of((f"w{i}", (10, 10)) for i in range(9)), max_elements=500).numel
    500
    """
    if layout.numel <= max_elements:
        return layout
    shapes = [
        (entry.name, _shortened(entry.shape, max(1, max_elements // min(4, len(layout))))) for entry in layout
    ]
    strides = range(1, len(shapes) + 1)
    excerpts = (Layout.of([*shapes[:-1:stride], shapes[-1]]) for stride in strides)
    return next(each for each in excerpts if each.numel <= max_elements)


def _shortened(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return a shape of at most `most` elements.

    >>> _shortened((50257, 768), 1 << 21), _shortened((9,), 4), _shortened((4, 3), 100), _shortened((6, 6), 4)
    ((2730, 768), (4,), (4, 3), (3, 1))
    """
    sides = list(shape)
    while math.prod(sides) > most:
        longest = sides.index(max(sides))
        others = math.prod(sides) // sides[longest]
        sides[longest] = max(sides[longest] // 2, most // others) if most < others else most // others
    return tuple(sides)


@dataclass(frozen=True)
class Played:
    calls: Mapping[str, float]
    nbytes: Mapping[str, float]
    encode_s: float
    decode_s: float
    coding_s: tuple[float, ...] = ()

    @property
    def spread(self) -> float:
        middle = median(self.coding_s or (0.0,))
        return median(abs(each - middle) for each in self.coding_s) / middle if middle else 0.0


def steadily(play: Callable[[], Sequence[Played]]) -> Played:
    plays = [costliest(play())]
    while pooled(plays).spread > STEADY and len(plays) < PLAYS:
        plays.append(costliest(play()))
    return pooled(plays)


def pooled(plays: Sequence[Played]) -> Played:
    ordered = sorted(plays, key=lambda each: each.encode_s + each.decode_s)
    steps = tuple(step_s for each in plays for step_s in each.coding_s)
    return replace(ordered[(len(ordered) - 1) // 2], coding_s=steps)


def costliest(ranks: Sequence[Played]) -> Played:

    def largest(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
        kinds = {kind for each in figures for kind in each}
        return {kind: max(each.get(kind, 0.0) for each in figures) for kind in kinds}

    return Played(
        largest([each.calls for each in ranks]),
        largest([each.nbytes for each in ranks]),
        max(each.encode_s for each in ranks),
        max(each.decode_s for each in ranks),
        tuple(map(max, zip(*(each.coding_s for each in ranks), strict=True))),
    )


def play(method: Method, layout: Layout, size: int, gradients: Gradients) -> list[Played]:
    return in_turns(size, lambda comm: _one(method, layout, comm, gradients))


def in_turns(size: int, act: Callable[[InTurn], T]) -> list[T]:
    """Return the results of `act` on `size` threads that compute one at a time."""
    baton = threading.Lock()

    def alone(comm: Loopback) -> T:
        with baton:
            return act(InTurn(comm, baton, Watch()))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Loopback.run(size, alone, timeout_s=600.0)
    finally:
        torch.set_num_threads(threads)


def figures(comm: Metered, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    calls: dict[str, float] = {}
    nbytes: dict[str, float] = {}
    for (_, kind), tally in comm.snapshot().parts.items():
        calls[kind] = calls.get(kind, 0.0) + tally.calls / steps
        nbytes[kind] = nbytes.get(kind, 0.0) + max(tally.network_sent, tally.network_received) / steps
    return calls, nbytes


def _one(method: Method, layout: Layout, inner: InTurn, gradients: Gradients) -> Played:
    comm, watch = Metered(inner), inner.watch
    inside = InStep(method, layout)
    exchange = Attached(method, layout, comm, inside)
    exchange.step = method.warm_at
    for rule in exchange.rules:
        rule.end_warmup()
    bucket = torch.empty(layout.numel, dtype=torch.float32, device="cpu")
    encode_s, decode_s = [], []
    for step in range(STEPS):
        gradients.write_(bucket, comm.rank, step)
        if step == 1:
            comm.reset()
        watch.start()
        exchange.begin()
        exchange.mean_(bucket, layout)
        exchange.end()
        inside.step_(bucket)
        watch.stop()
        encode_s.append(watch.before_s)
        decode_s.append(watch.after_s)
    coding_s = tuple(map(sum, zip(encode_s[1:], decode_s[1:], strict=True)))
    return Played(*figures(comm, STEPS - 1), median(encode_s[1:]), median(decode_s[1:]), coding_s)
