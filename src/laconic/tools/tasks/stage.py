"""Training of one pipeline stage with torch's schedule; its replicas exchange gradients by a method."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from laconic.core.errors import NonFiniteError
from laconic.exchange.stats import Stats
from laconic.pipeline import Handle, compress
from laconic.pipeline.crossing import Crossing
from laconic.strategies.distribute import distribute, strategy_or_method
from laconic.strategies.distributed_optimizer import DistributedOptimizer
from laconic.strategies.gradients import all_finite, gradients
from laconic.tools.tasks.measured_stage import MeasuredStage, Passed
from laconic.tools.tasks.settings import Pipeline
from laconic.tools.tasks.task import Recipe, cross_entropy

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class StageAtWork:
    """This rank's stage of its replica. Create it on all ranks of the default group.

    `whole`: the model, equal on all ranks. `example`: a batch of its inputs. `crossing`: coding between
    stages. `samples`: most examples of a replica.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        recipe: Recipe,
        whole: nn.Module,
        example: Tensor,
        *,
        crossing: Crossing,
        samples: int,
        lr: float | None = None,
        seed: int = 0,
    ) -> None:
        assert recipe.cut is not None
        rank, cut = dist.get_rank(), recipe.cut
        self.pipeline, self.whole = pipeline, whole
        self.number = pipeline.stage(rank)
        self.first, self.last = self.number == 0, self.number == pipeline.stages - 1
        self.own = cut(whole, self.number, pipeline.stages)
        self._parameters = [[*cut(whole, i, pipeline.stages).parameters()] for i in range(pipeline.stages)]
        self._line, across = groups(pipeline, rank)
        method = strategy_or_method(pipeline.between)
        optimizer = recipe.optimizer(self.own, lr, method if across is not None else None)
        computed: nn.Module = self.own
        self.optimizer: torch.optim.Optimizer = optimizer
        if across is not None:
            computed, self.optimizer = distribute(self.own, optimizer, method, group=across, seed=seed)
        micro = shapes(whole, recipe, pipeline, example)
        self.stage = MeasuredStage(
            computed,
            self.number,
            pipeline.stages,
            torch.device("cpu"),
            input_args=micro[self.number],
            output_args=micro[self.number + 1],
            group=self._line,
        )
        # the loss is already divided by micro-batches
        self.schedule = SCHEDULES[pipeline.schedule](
            self.stage, pipeline.micro_batches, loss_fn=self._loss, scale_grads=False
        )
        self.handle: Handle | None = None
        if not crossing.dense:
            self.handle = compress(
                self.schedule,
                forward=crossing.forward,
                backward=crossing.backward,
                samples=samples if crossing.remembers else None,
                seed=seed,
                group=dist.group.WORLD,
            )
            handle = self.handle
            self.stage.decoding = lambda: handle.stats().decode_s

    def step(self, x: Tensor, y: Tensor, samples: Tensor) -> float | None:
        """Run forward and backward; return the mean loss on the last stage. `samples`: int64 (batch,) ids."""
        losses: list[Tensor] = []
        if self.handle is not None:
            self.handle.samples = samples
        if self.first:
            self.schedule.step(x)
        elif self.last:
            self.schedule.step(target=y, losses=losses, return_outputs=False)
        else:
            self.schedule.step()
        return torch.stack(losses).detach().sum().item() if self.last else None

    def update(self) -> None:
        if not isinstance(self.optimizer, DistributedOptimizer) and not all_finite(gradients(self.optimizer)):
            raise NonFiniteError("a gradient is NaN or infinite")
        self.optimizer.step()

    def passed(self) -> Passed:
        stage = self.stage
        up, down = stage.dense("activations"), stage.dense("gradients")
        if self.handle is None:
            return Passed(stage.forward_s, stage.backward_s, 0.0, 0.0, up, down, up, down)
        coded = self.handle.stats()
        return Passed(
            stage.forward_s,
            stage.backward_s,
            coded.encode_s,
            coded.decode_s,
            replace(up, sent_bytes=coded.forward_sent, received_bytes=coded.forward_received),
            replace(down, sent_bytes=coded.backward_sent, received_bytes=coded.backward_received),
            up,
            down,
        )

    def replicas(self) -> Stats:
        if isinstance(self.optimizer, DistributedOptimizer):
            return self.optimizer.stats()
        return Stats(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)

    def averaged(self) -> AbstractContextManager[float]:
        if isinstance(self.optimizer, DistributedOptimizer):
            return self.optimizer.averaged()
        return nullcontext(0.0)

    def gather(self) -> None:
        """Load the other stages' parameters into `whole`. Collective."""
        start = self.pipeline.replica(dist.get_rank()) * self.pipeline.stages
        for stage, parameters in enumerate(self._parameters):
            for parameter in parameters:
                dist.broadcast(parameter.data, start + stage, group=self._line)

    def state_dict(self) -> dict[str, Any]:
        optimizer = self.optimizer.state_dict()  # first: it receives pending messages into the model
        coded = {} if self.handle is None else {"crossing": self.handle.state_dict()}
        return {"model": self.own.state_dict(), "optimizer": optimizer} | coded

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.own.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.handle is not None:
            self.handle.load_state_dict(state["crossing"])

    def _loss(self, logits: Tensor, y: Tensor) -> Tensor:
        began = time.perf_counter()
        loss = cross_entropy(logits, y) / self.pipeline.micro_batches
        self.stage.forward_s += time.perf_counter() - began
        return loss


def groups(pipeline: Pipeline, rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """Return the groups of this pipeline and of equal stages. Every rank creates all."""
    stages, replicas = range(pipeline.stages), range(pipeline.replicas)
    lines = [dist.new_group([stage + pipeline.stages * r for stage in stages]) for r in replicas]
    line: dist.ProcessGroup = lines[pipeline.replica(rank)]
    if pipeline.replicas == 1:
        return line, None
    across = [dist.new_group([stage + pipeline.stages * r for r in replicas]) for stage in stages]
    return line, across[pipeline.stage(rank)]


def shapes(whole: nn.Module, recipe: Recipe, pipeline: Pipeline, example: Tensor) -> list[Tensor]:
    """Return a micro-batch at each stage's input and the last output, on the meta device."""
    assert recipe.cut is not None
    model = deepcopy(whole).to("meta")
    found = [example[: len(example) // pipeline.micro_batches].to("meta")]
    with torch.no_grad():
        for stage in range(pipeline.stages):
            out = recipe.cut(model, stage, pipeline.stages)(found[-1])
            found.append(out.requires_grad_())
    return found
