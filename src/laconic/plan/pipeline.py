"""The time line of a pipeline's step: stages compute micro-batches in turn, and links carry what crosses.

    forward i of stage s     when its activation has arrived and was decoded, and the stage is free
    message                  when it is encoded, and the sender's and the receiver's link are free
    step                     when the last stage is done with its last backward, and with the update

GPipe does all forwards, then all backwards. 1F1B (Narayanan et al. 2019, SOSP, arXiv:1806.03377) begins with
as many forwards as stages lie ahead, then alternates. Torch's 1F1B waits until a message is sent before the
stage goes on; its GPipe does not. It posts sends before receives, and then a pair of gloo's ranks sends in
one direction at a time (`duplex=False`): 1.57 MB both ways over 100 Mbit/s take 0.26 s, and 0.14 s with
receives posted first, as stages under `laconic.pipeline.compress` do. With equal stages and free
messages both leave a bubble of (stages - 1) / (stages - 1 + micro-batches) of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.plan.network import Network

Operation = tuple[str, int]  # "forward" or "backward", and the micro-batch


@dataclass(frozen=True)
class StageWork:
    """Seconds that a stage computes for one micro-batch."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Crossed:
    """What crosses a boundary for one micro-batch: bytes up and down, seconds of coding per message."""

    up: float
    down: float
    encode_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class PipelineSplit:
    """One step. `waiting`: share of it that a stage does not compute, on the average over stages.

    `nbytes`: of all messages.
    """

    step_s: float
    waiting: float
    nbytes: float


def pipeline_step(
    stages: Sequence[StageWork],
    crossed: Crossed,
    network: Network,
    micro_batches: int,
    *,
    schedule: str = "1f1b",
    update_s: float = 0.0,
    duplex: bool = True,
) -> PipelineSplit:
    """The forecast of a step of equal boundaries. Each stage is a worker of its own link.

    `duplex`: whether neighbours send each other at the same time.

    Raises `SpecError` for an unknown schedule, or for 1F1B with fewer micro-batches than stages.

    >>> equal, free = [StageWork(1.0, 2.0)] * 4, Network(1e30, 0.0)
    >>> split = pipeline_step(equal, Crossed(0, 0), free, 8)
    >>> split.step_s, round(split.waiting, 4), round(3 / (3 + 8), 4)
    (33.0, 0.2727, 0.2727)
    """
    orders = [_order(schedule, len(stages), stage, micro_batches) for stage in range(len(stages))]
    line = _Line(stages, crossed, network, blocking=schedule == "1f1b", duplex=duplex)
    left = [list(order) for order in orders]
    while any(left):
        nexts = [(stage, operations[0]) for stage, operations in enumerate(left) if operations]
        ready = [(line.start_s(stage, *operation), stage) for stage, operation in nexts]
        began, stage = min((when, stage) for when, stage in ready if when is not None)
        line.run(stage, *left[stage].pop(0), began)
    step_s = max(line.free) + update_s
    busy = sum(micro_batches * (each.forward_s + each.backward_s) for each in stages)
    nbytes = (len(stages) - 1) * micro_batches * (crossed.up + crossed.down)
    return PipelineSplit(step_s, 1 - busy / (len(stages) * step_s), nbytes)


class _Line:
    """When each stage and each link is free, and when each message has arrived."""

    def __init__(
        self,
        stages: Sequence[StageWork],
        crossed: Crossed,
        network: Network,
        *,
        blocking: bool,
        duplex: bool,
    ) -> None:
        self.stages, self.crossed, self.network = stages, crossed, network
        self.blocking, self.duplex = blocking, duplex
        self._pairs = [0.0] * len(stages)  # of each stage and the next one
        self.free = [0.0] * len(stages)
        self._up, self._down = [0.0] * len(stages), [0.0] * len(stages)  # of each worker's link
        self._arrived: dict[tuple[int, str, int], float] = {}

    def start_s(self, stage: int, kind: str, micro: int) -> float | None:
        """When this operation could begin, or None if its message is not sent yet."""
        given = stage == 0 if kind == "forward" else stage == len(self.stages) - 1
        arrived = 0.0 if given else self._arrived.get((stage, kind, micro))
        return None if arrived is None else max(self.free[stage], arrived)

    def run(self, stage: int, kind: str, micro: int, began: float) -> None:
        """Compute, and send on what comes of it."""
        forward = kind == "forward"
        work = self.stages[stage]
        to = stage + 1 if forward else stage - 1
        received = stage > 0 if forward else stage < len(self.stages) - 1
        done = began + (work.forward_s if forward else work.backward_s)
        done += self.crossed.decode_s if received else 0.0
        self.free[stage] = done
        if not 0 <= to < len(self.stages):
            return
        encoded = done + self.crossed.encode_s
        begins = max(encoded, self._up[stage], self._down[to])
        if not self.duplex:
            begins = max(begins, self._pairs[min(stage, to)])
        nbytes = self.crossed.up if forward else self.crossed.down
        sent = begins + nbytes / self.network.bytes_a_second
        self._up[stage] = self._down[to] = self._pairs[min(stage, to)] = sent
        self._arrived[to, kind, micro] = sent + self.network.latency_s
        self.free[stage] = sent if self.blocking else encoded


def _order(schedule: str, stages: int, stage: int, micro_batches: int) -> list[Operation]:
    """A stage's operations in order."""
    every = range(micro_batches)
    if schedule == "gpipe":
        return [("forward", i) for i in every] + [("backward", i) for i in every]
    if schedule != "1f1b":
        raise SpecError(f"schedule must be 1f1b or gpipe, got {schedule!r}")
    arguments.whole("micro_batches", micro_batches, stages, hint="1f1b needs as many as stages, or gpipe")
    ahead = stages - 1 - stage
    found: list[Operation] = [("forward", i) for i in range(ahead)]
    for i in every:
        found += [("forward", i + ahead)] if i + ahead < micro_batches else []
        found.append(("backward", i))
    return found
