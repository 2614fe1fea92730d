"""Schedules of a pipeline's step: the order of a worker's forwards and backwards.

gpipe         all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)
1f1b          as many forwards as stages lie ahead, then alternating (Narayanan et al. 2019, SOSP,
              arXiv:1806.03377)
interleaved   the same with several stages per worker, worker w those of w, w + N, ... (Narayanan et al. 2021,
              arXiv:2104.04473), in torch's order
"""

from __future__ import annotations

from collections import Counter

from laconic.core import arguments
from laconic.core.errors import SpecError

SCHEDULES = ("gpipe", "1f1b", "interleaved")
Operation = tuple[str, int, int]  # "forward" or "backward", stage, micro-batch


def bubble(workers: int, micro_batches: int, turns: int = 1) -> float:
    """Return a worker's share of waiting, with equal stages and free messages.

    >>> bubble(4, 12), bubble(4, 12, turns=2)
    (0.2, 0.1111111111111111)
    """
    return (workers - 1) / (turns * micro_batches + workers - 1)


def order(schedule: str, workers: int, worker: int, micro_batches: int, turns: int = 1) -> list[Operation]:
    """Return a worker's operations in order. Raises `SpecError`.

    >>> order("1f1b", 2, 0, 2)
    [('forward', 0, 0), ('forward', 0, 1), ('backward', 0, 0), ('backward', 0, 1)]
    """
    check(schedule, workers, micro_batches, turns)
    if schedule == "interleaved":
        return _interleaved(workers, worker, micro_batches, turns)
    every = range(micro_batches)
    if schedule == "gpipe":
        return [("forward", worker, i) for i in every] + [("backward", worker, i) for i in every]
    ahead = workers - 1 - worker
    found: list[Operation] = [("forward", worker, i) for i in range(ahead)]
    for i in every:
        found += [("forward", worker, i + ahead)] if i + ahead < micro_batches else []
        found.append(("backward", worker, i))
    return found


def check(schedule: str, workers: int, micro_batches: int, turns: int = 1) -> None:
    if schedule not in SCHEDULES:
        raise SpecError(f"schedule must be {', '.join(SCHEDULES[:-1])} or {SCHEDULES[-1]}, got {schedule!r}")
    if schedule == "gpipe":
        arguments.whole("micro_batches", micro_batches, 1)
        return
    arguments.whole(
        "micro_batches", micro_batches, workers, hint=f"{schedule} needs as many as workers, or gpipe"
    )
    rounds = micro_batches // workers
    if schedule == "interleaved" and micro_batches % rounds:
        raise SpecError(
            f"interleaved does micro-batches in {rounds} equal rounds, a micro-batch a worker or more, got"
            f" micro_batches={micro_batches}: give a multiple of {workers}"
        )
    if schedule == "interleaved":
        arguments.whole("turns", turns, 2, hint="with one stage a worker it is 1f1b")


def _interleaved(workers: int, worker: int, micro_batches: int, turns: int) -> list[Operation]:
    """Pass rounds of micro-batches through the worker's stages in turn, and back."""
    a_round = micro_batches // (micro_batches // workers)
    whole = turns * micro_batches
    ahead = min((turns - 1) * a_round + 2 * (workers - 1 - worker), whole)
    done: Counter[tuple[str, int]] = Counter()

    def operation(kind: str, turn: int) -> Operation:
        stage = turn * workers + worker
        done[kind, stage] += 1
        return kind, stage, done[kind, stage] - 1

    def forward(i: int) -> Operation:
        return operation("forward", i // a_round % turns)

    def backward(i: int) -> Operation:
        return operation("backward", turns - 1 - i // a_round % turns)

    found = [forward(i) for i in range(ahead)]
    for i in range(whole - ahead):
        found += [forward(ahead + i), backward(i)]
    return found + [backward(i) for i in range(whole - ahead, whole)]
