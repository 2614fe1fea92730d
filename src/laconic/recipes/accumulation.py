"""Accumulation: any global batch on any machine, as the mean over micro-batches that fit.

A step's gradient is the sum of (size of the part / size of the whole) * its mean gradient: exactly that of
the whole batch, but for BatchNorm, which sees one part at a time. Ranks exchange once a step.

On one rank the first part and the whole are the two batch sizes of the gradient noise scale; on several the
exchange measures it, see `laconic.exchange.noise_scale`.
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
    """How a global batch comes apart: `per_rank` examples on each rank, in parts of `sizes`, largest first.

    Args:
        batch: Examples of a step over all ranks.
        most: Most examples in one forward pass.
        ranks: Number of ranks, which divides `batch`; default: the size of the default process group, or 1.

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
                f"a global batch must be a multiple of the {ranks} ranks, so that each example counts alike,"
                f" got {batch}: take {near}"
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
        """Gradient noise in batches of `sizes[0]` examples, measured at every fifth step on a single rank.

        None with one part a step, and before the first. `noise.examples(unit=sizes[0])` is the batch up to
        which a larger one pays.
        """
        return self._noise.noise()

    def parts(
        self, model: nn.Module, *tensors: Tensor, scaler: torch.amp.GradScaler | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Micro-batches of this rank's tensors, each of `per_rank` rows; every part but the last is no_sync.

        Give every part its backward pass, and leave no part out:

            for share, x, y in accumulation.parts(model, x, y):
                (share * loss_function(model(x), y)).backward()

        Args:
            model: Under DistributedDataParallel or plain; compressed or not.
            tensors: Inputs, labels and the like; examples are rows.
            scaler: The GradScaler that scales the losses, so that `noise` is of gradients without its scale;
                default: none.

        Returns:
            An iterator of (share, *rows), where share is the part's weight in the mean; they sum to 1.

        Raises:
            SpecError: A tensor has another number of rows.
            AttachError: `scaler` is no GradScaler.
        """
        check_is_scaler(scaler)
        for each in tensors:
            if len(each) != self.per_rank:
                raise SpecError(
                    f"this rank's part of a batch of {self.batch} on {self.ranks} ranks is {self.per_rank}"
                    f" examples, got {len(each)}: let the loader give batches of {self.per_rank}, without a"
                    " shorter last one (drop_last=True)"
                )
        replicated, last = inside(model), len(self.sizes) - 1
        trained = [each for each in model.parameters() if each.requires_grad]
        due = self.ranks == 1 and last > 0 and self._steps % EVERY == 0
        measures = due and all(each.grad is None for each in trained)  # nothing from before in the sum
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
    """The squared norm of all gradients together."""
    grads = [each.grad for each in parameters if each.grad is not None and not each.grad.is_sparse]
    return float(torch.nn.utils.get_total_norm(grads)) ** 2 if grads else 0.0
