"""Gradient accumulation: a global batch as the mean over micro-batches that fit in memory.

A step's gradient equals that of the whole batch except for BatchNorm. Ranks exchange once per step, and
measure the gradient noise scale (`laconic.exchange.noise_scale`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.core import arguments
from laconic.core.errors import SpecError
from laconic.ddp.compress import inside
from laconic.exchange.noise_scale import EVERY, Noise, NoiseScale
from laconic.optim.unwrapping import check_is_scaler


class Accumulation:
    """Split of a global batch: `per_rank` examples on each rank, in parts of `sizes`, largest first.

    Args:
        batch: Examples per step over all ranks.
        most: Maximum number of examples in one forward pass.
        ranks: Number of ranks, which must divide `batch`. None: the default process group's size, or 1.

    Raises:
        SpecError: The batch does not divide, or a number is out of range.

    >>> Accumulation(4096, most=600, ranks=2).sizes
    (512, 512, 512, 512)
    >>> Accumulation(10, most=4, ranks=1).sizes
    (4, 3, 3)
    """

    def __init__(self, batch: int, *, most: int = 256, ranks: int | None = None) -> None:
        if ranks is None:
            ranks = dist.get_world_size() if dist.is_initialized() else 1
        arguments.whole("ranks", ranks, 1)
        arguments.whole("most", most, 1)
        arguments.whole("batch", batch, 1)
        if batch % ranks:
            low, high = batch - batch % ranks, batch + ranks - batch % ranks
            near = f"{low} or {high}" if low else str(high)
            raise SpecError(
                f"batch must be a multiple of the number of ranks, {ranks}, got {batch}: use {near}"
            )
        self.batch, self.ranks, self.most = batch, ranks, most
        self.per_rank = batch // ranks
        passes = -(-self.per_rank // most)
        whole, more = divmod(self.per_rank, passes)
        self.sizes = (whole + 1,) * more + (whole,) * (passes - more)
        self._noise, self._steps = NoiseScale(), 0

    def __repr__(self) -> str:
        return f"Accumulation({self.batch}, most={self.most}, ranks={self.ranks})"

    @property
    def noise(self) -> Noise | None:
        """Gradient noise in batches of `sizes[0]` examples, measured every fifth step on a single rank.

        None with one part per step, and before the first measurement. Batches above
        `noise.examples(unit=sizes[0])` no longer speed up training.
        """
        return self._noise.noise()

    def parts(
        self, model: nn.Module, *tensors: Tensor, scaler: torch.amp.GradScaler | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Yield micro-batches of this rank's tensors, which have `per_rank` rows.

        Run a backward pass for every part:

            for share, x, y in accumulation.parts(model, x, y):
                (share * loss_function(model(x), y)).backward()

        Args:
            model: Under DistributedDataParallel or plain; compressed or not.
            tensors: Inputs and labels, with examples as rows.
            scaler: GradScaler of the losses, to measure `noise` without its scale.

        Returns:
            An iterator of (share, *rows); the shares, weights in the mean, sum to 1. All parts but the
            last are under no_sync.

        Raises:
            SpecError: A tensor has another number of rows.
            AttachError: `scaler` is no GradScaler.
        """
        check_is_scaler(scaler)
        for each in tensors:
            if len(each) != self.per_rank:
                raise SpecError(
                    f"this rank's part of a batch of {self.batch} on {self.ranks} ranks must have"
                    f" {self.per_rank} examples, got {len(each)}: set the loader's batch size to"
                    f" {self.per_rank}, with drop_last=True"
                )
        replicated, last = inside(model), len(self.sizes) - 1
        trained = [each for each in model.parameters() if each.requires_grad]
        due = self.ranks == 1 and last > 0 and self._steps % EVERY == 0
        measures = due and all(each.grad is None for each in trained)  # no earlier gradients
        pieces = zip(*(torch.split(each, list(self.sizes)) for each in tensors), strict=True)
        small = 0.0
        for number, (size, rows) in enumerate(zip(self.sizes, pieces, strict=True)):
            with nullcontext() if replicated is None or number == last else replicated.no_sync():
                yield (size / self.per_rank, *rows)
            if measures and number == 0:
                small = squared_norm(trained) * (self.per_rank / size) ** 2
        if measures:
            of_scale = 1.0 if scaler is None else scaler.get_scale() ** 2
            whole = squared_norm(trained)
            self._noise.add(small / of_scale, whole / of_scale, self.per_rank / self.sizes[0])
        self._steps += 1


def squared_norm(parameters: list[nn.Parameter]) -> float:
    grads = [each.grad for each in parameters if each.grad is not None and not each.grad.is_sparse]
    return float(torch.nn.utils.get_total_norm(grads)) ** 2 if grads else 0.0
