"""Time line of a pipeline's step.

    forward i of stage s     when its activation has arrived and was decoded, and the stage is free
    message                  when it is encoded, and the sender's and the receiver's link are free
    step                     when the last stage is done with its last backward, and with the update

In torch's 1F1B, unlike GPipe and interleaved, a stage waits until its message is sent. It posts sends before
receives, and gloo then sends in one direction at a time (`duplex=False`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from laconic.core.errors import SpecError
from laconic.tools.plan.network import Network
from laconic.tools.plan.schedules import order


@dataclass(frozen=True)
class StageWork:
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Crossed:
    up: float
    down: float
    encode_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True)
class PipelineSplit:
    """One step. `waiting`: mean share of time without computing. `ends_s`: of workers' last backwards."""

    step_s: float
    waiting: float
    nbytes: float
    ends_s: tuple[float, ...] = ()


def pipeline_step(
    stages: Sequence[StageWork],
    crossed: Crossed,
    network: Network,
    micro_batches: int,
    *,
    schedule: str = "1f1b",
    workers: int | None = None,
    update_s: float = 0.0,
    duplex: bool = True,
) -> PipelineSplit:
    """Return the forecast of a step with equal boundaries.

    `workers`: in interleaved, stage s is on worker s mod `workers`; default: one per stage. `duplex`:
    whether neighbours send at the same time. Raises `SpecError`.

    >>> equal, free = [StageWork(1.0, 2.0)] * 4, Network(1e30, 0.0)
    >>> split = pipeline_step(equal, Crossed(0, 0), free, 8)
    >>> split.step_s, round(split.waiting, 4), round(3 / (3 + 8), 4)
    (33.0, 0.2727, 0.2727)
    """
    size = len(stages) if workers is None else workers
    turns, rest = divmod(len(stages), size)
    if rest or (turns > 1 and schedule != "interleaved"):
        raise SpecError(
            f"{len(stages)} stages do not go on {size} workers with the schedule {schedule}: one a worker, or"
            " as many on each with interleaved"
        )
    left = [order(schedule, size, worker, micro_batches, turns) for worker in range(size)]
    line = _Line(stages, size, crossed, network, blocking=schedule == "1f1b", duplex=duplex)
    while any(left):
        nexts = [operations[0] for operations in left if operations]
        ready = [(line.start_s(*operation), operation) for operation in nexts]
        began, operation = min(
            ((when, operation) for when, operation in ready if when is not None), default=(math.inf, nexts[0])
        )
        if line.leaving and line.leaving[0][0] <= began:
            line.send(*heappop(line.leaving))
        else:
            left[operation[1] % size].pop(0)
            line.run(*operation, began)
    step_s = max(line.free) + update_s
    busy = sum(micro_batches * (each.forward_s + each.backward_s) for each in stages)
    nbytes = (len(stages) - 1) * micro_batches * (crossed.up + crossed.down)
    return PipelineSplit(step_s, 1 - busy / (size * step_s) if step_s else 0.0, nbytes, tuple(line.free))


class _Line:
    def __init__(
        self,
        stages: Sequence[StageWork],
        workers: int,
        crossed: Crossed,
        network: Network,
        *,
        blocking: bool,
        duplex: bool,
    ) -> None:
        self.stages, self.workers, self.crossed, self.network = stages, workers, crossed, network
        self.blocking, self.duplex = blocking, duplex
        self._pairs: dict[frozenset[int], float] = {}  # neighbours that send one at a time
        self.free = [0.0] * workers
        self._up, self._down = [0.0] * workers, [0.0] * workers
        self._arrived: dict[tuple[str, int, int], float] = {}
        self.leaving: list[tuple[float, int, int, str, int]] = []  # time encoded, from and to stages

    def start_s(self, kind: str, stage: int, micro: int) -> float | None:
        given = stage == 0 if kind == "forward" else stage == len(self.stages) - 1
        arrived = 0.0 if given else self._arrived.get((kind, stage, micro))
        return None if arrived is None else max(self.free[stage % self.workers], arrived)

    def run(self, kind: str, stage: int, micro: int, began: float) -> None:
        forward = kind == "forward"
        work = self.stages[stage]
        to = stage + 1 if forward else stage - 1
        received = stage > 0 if forward else stage < len(self.stages) - 1
        done = began + (work.forward_s if forward else work.backward_s)
        done += self.crossed.decode_s if received else 0.0
        self.free[stage % self.workers] = done
        if 0 <= to < len(self.stages):
            self.free[stage % self.workers] = encoded = done + self.crossed.encode_s
            heappush(self.leaving, (encoded, stage, to, kind, micro))

    def send(self, encoded: float, stage: int, to: int, kind: str, micro: int) -> None:
        here, there = stage % self.workers, to % self.workers
        begins, pair = max(encoded, self._up[here], self._down[there]), frozenset((here, there))
        if not self.duplex:
            begins = max(begins, self._pairs.get(pair, 0.0))
        nbytes = self.crossed.up if kind == "forward" else self.crossed.down
        sent = begins + nbytes / self.network.bytes_a_second
        self._up[here] = self._down[there] = self._pairs[pair] = sent
        self._arrived[kind, to, micro] = sent + self.network.latency_s
        if self.blocking:
            self.free[here] = sent
