"""Large batches: --recipe, --copies and --micro-batch-size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.core.errors import SpecError
from laconic.core.turn import mix
from laconic.data.copies_sampler import Across
from laconic.exchange.method import Method
from laconic.recipes import Accumulation, large_batch
from laconic.recipes.large_batch import Kind
from laconic.strategies.strategy import Strategy
from laconic.tools.tasks.precision import Precision
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.skew import SkewedShard
from laconic.tools.tasks.task import Recipe, cross_entropy

Rate = Callable[[int], float]
MICRO_BATCH_SIZE = 256


@dataclass(frozen=True)
class LargeBatch:
    """Options of large batches. `micro_batch_size`: a maximum."""

    recipe: Kind | None = None
    copies: int = 1
    across: Across = "ranks"
    micro_batch_size: int | None = None

    def check(self, workers: int, skew: float | None) -> None:
        if self.across == "batch" and self.copies == 1:
            raise SpecError("--across batch places --copies, which is 1: use --copies 2 or more, or omit it")
        if self.shares_examples and workers % self.copies:
            raise SpecError(
                f"--copies across ranks must divide --workers {workers}, got {self.copies}: use --workers"
                f" {self.copies * (workers // self.copies + 1)}, or --across batch"
            )
        if self.shares_examples and skew is not None:
            raise SpecError(
                f"--copies {self.copies} across ranks gives workers equal examples, but --skew {skew:g}"
                " gives them different ones: omit one of the two, or use --across batch"
            )

    @property
    def shares_examples(self) -> bool:
        """Whether ranks draw the same examples: gradients are not independent."""
        return self.copies > 1 and self.across == "ranks"

    def optimizer(
        self,
        model: nn.Module,
        recipe: Recipe,
        by: Method | Strategy,
        *,
        lr: float | None,
        batch: int,
        base_batch: int,
        steps: int,
    ) -> tuple[Optimizer, float, Rate]:
        if self.recipe is None:
            made = recipe.optimizer(model, lr, by)
            peak = float(made.param_groups[0]["lr"])
            return made, peak, lambda step: recipe.rate(peak, step, steps)
        settings: dict[str, Any] = {"lr": lr, "scaling": None if lr is None else "none"}
        if self.recipe != "lamb":
            settings |= {
                "lr": recipe.lr if lr is None else lr,
                "weight_decay": recipe.weight_decay,
                "momentum": 0.0 if isinstance(by, Strategy) and by.owns_momentum else recipe.momentum,
            }
        made, schedule = large_batch(
            model, batch=batch, base_batch=base_batch, steps=steps, optimizer=self.recipe, **settings
        )
        peak = float(schedule.base_lrs[0])
        return made, peak, partial(_scaled, peak, schedule.lr_lambdas[0])

    def shard(
        self, of: Callable[[int, int], Shard | SkewedShard], rank: int, size: int
    ) -> Shard | SkewedShard | CopiedShard:
        if self.copies == 1:
            return of(rank, size)
        if self.across == "batch":
            return CopiedShard(of(rank, size), self.copies, 0)
        return CopiedShard(of(rank // self.copies, size // self.copies), 1, rank % self.copies)

    def ahead(
        self, model: nn.Module, x: Tensor, y: Tensor, precision: Precision
    ) -> tuple[Tensor, Tensor, float, float]:
        """Run backward of all micro-batches but the last, unsynchronised.

        Returns the last one's inputs, labels and weight, and the others' loss.
        """
        most = self.micro_batch_size or (len(x) if self.recipe is None else MICRO_BATCH_SIZE)
        accumulation = Accumulation(len(x), most=most, ranks=1)
        earlier, last = 0.0, len(accumulation.sizes) - 1
        for number, (share, rows, labels) in enumerate(accumulation.parts(model, x, y)):
            if number == last:
                return rows, labels, share, earlier
            with precision.autocast():
                loss = share * cross_entropy(model(rows), labels)
            precision.backward(loss)
            earlier += loss.item()
        raise AssertionError("a batch has a last part")


@dataclass(frozen=True, eq=False)
class CopiedShard:
    order: Shard | SkewedShard
    repeats: int
    copy: int

    def indices(self, step: int) -> Tensor:
        return self.order.indices(step).repeat(self.repeats)

    def rng(self, step: int) -> torch.Generator:
        return torch.Generator("cpu").manual_seed(mix(self.order.rng(step).initial_seed(), self.copy) >> 1)


def _scaled(peak: float, factor: Rate, step: int) -> float:
    return peak * factor(step)
