"""decent-dp (PyPI): each rank steps by itself, inside backward, and averages its model with a neighbour."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import SGD

from benchmarks.peers.running import LR, MOMENTUM, Running


class Within:
    """The optimiser of a model that steps within its backward pass."""

    def zero_grad(self) -> None:
        """Its hooks do that."""

    def step(self) -> None:
        """Its hooks have done that."""


def ring(model: nn.Module) -> Running:
    """Averages over a ring: each rank with one neighbour in this step, with the other in the next."""
    from decent_dp.ddp import DecentralizedDataParallel  # type: ignore[import-not-found]  # see installed.py
    from loguru import logger  # type: ignore[import-not-found]

    logger.remove()  # it tells its buckets on stderr

    def optimiser(named: list[tuple[str, Tensor]]) -> SGD:
        return SGD([parameter for _, parameter in named], lr=LR, momentum=MOMENTUM)

    made: Any = DecentralizedDataParallel(model, optim_fn=optimiser, topology="ring")
    return Running(made, Within())
