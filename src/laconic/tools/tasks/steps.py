"""Common parts of training loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from laconic.core.errors import NonFiniteError
from laconic.exchange.stats import Stats

COUNTED = ("payload_sent", "payload_received", "network_sent", "network_received", "dense")
TIMED = ("encode_s", "communicate_s", "decode_s")


class Schedule(Protocol):
    @property
    def steps(self) -> int: ...
    @property
    def eval_every(self) -> int: ...


def due(settings: Schedule, done: int) -> bool:
    return done == settings.steps or bool(settings.eval_every and done % settings.eval_every == 0)


def spent(before: Stats, now: Stats, with_noise: bool = True) -> dict[str, Any]:
    between = {name: getattr(now, name) - getattr(before, name) for name in COUNTED + TIMED}
    phases = {name: total - before.phases.get(name, 0) for name, total in now.phases.items()}
    measured = now.noise if with_noise and now.noise != before.noise else None
    noise = {} if measured is None else {"noise": [measured.variance, measured.signal, measured.share]}
    return between | {"phases": phases} | noise


@contextmanager
def explained(optimizer: torch.optim.Optimizer, step: int, what: str = "gradients") -> Iterator[None]:
    try:
        yield
    except NonFiniteError as error:
        rate = max(float(group["lr"]) for group in optimizer.param_groups)
        raise NonFiniteError(
            f"training has diverged: the {what} of step {step} are not finite, at a learning rate of"
            f" {rate:g}; use a lower --lr"
        ) from error
