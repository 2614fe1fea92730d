"""Training of a whole model on each rank.

Batches, augmentation and rates depend on (seed, rank, step), so a resumed training computes the same bits.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from laconic.core.turn import mix
from laconic.strategies.distribute import distribute, strategy_or_method
from laconic.tools.tasks import checkpoint
from laconic.tools.tasks.catalogue import find
from laconic.tools.tasks.evaluation import evaluate
from laconic.tools.tasks.group_model import built, save_model, share_buffers
from laconic.tools.tasks.loading import mapped
from laconic.tools.tasks.loop import train
from laconic.tools.tasks.precision import Precision
from laconic.tools.tasks.resuming import check_same
from laconic.tools.tasks.settings import Emit, Event, TrainingSettings
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.skew import SkewedShard
from laconic.tools.tasks.steps import due, explained, spent
from laconic.tools.tasks.task import Task, Tensors, cross_entropy
from laconic.tools.tasks.transforms import Transforms, attach_all


def train_rank(settings: TrainingSettings, emit: Emit) -> list[int]:
    work = Replica(settings)
    if work.done:
        emit({"kind": "back", "step": work.done})
    if settings.resume_from is not None:
        work.restore(checkpoint.load(settings.resume_from, rank=work.rank, size=work.size))
    if work.rank == 0:
        kind = type(work.optimizer.optimizer).__name__
        emit({"kind": "start", "step": work.done, "optimiser": kind, "lr": work.peak_lr})
    with work.transforms.training():
        train(settings, work, emit)
    work.optimizer.finish()
    for event in work.transforms.finish(settings.folder, work.rank):
        emit(event | {"step": work.done})
    if settings.checkpoint_every and work.rank == 0:
        save_model(settings.folder, work.plain)
    return work.optimizer.notes().get("living", work.living)  # type: ignore[no-any-return]


class Replica:
    """A rank's training. `done`: above 0 at first if it replaces a dead worker."""

    def __init__(self, settings: TrainingSettings) -> None:
        self.settings = settings
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.task, self.tensors = find(settings.task), mapped(settings.data)
        recipe = self.task.recipe(settings.model)
        torch.manual_seed(settings.seed)
        self.plain = built(recipe, settings.bits, mix(settings.seed, self.rank))
        spec = strategy_or_method(settings.spec)
        sizes = {
            "batch": settings.batch * self.size,
            "base_batch": self.task.batch * self.size,
            "steps": settings.steps,
        }
        updates, self.peak_lr, self.rate = settings.large_batch.optimizer(
            self.plain, recipe, spec, lr=settings.lr, **sizes
        )
        self.patience_s = settings.patience_of(spec)
        self.precision = Precision(settings.precision)
        early = attach_all(settings, self.plain, updates, distributed=False)
        self.model, self.optimizer = distribute(
            self.plain,
            updates,
            spec,
            seed=settings.seed,
            patience_s=self.patience_s,
            quorum=settings.quorum_of(spec),
            scaler=self.precision.scaler,
        )
        self.transforms = Transforms(early | attach_all(settings, self.model, updates, distributed=True))
        self.shard = settings.large_batch.shard(
            partial(shard_of, settings, self.task, self.tensors), self.rank, self.size
        )
        self.stats = self.optimizer.stats()
        self.done, self.living = self.stats.steps, [*range(self.size)]

    def step(self) -> list[Event]:
        settings, optimizer, precision, step = self.settings, self.optimizer, self.precision, self.done
        for group in optimizer.param_groups:
            group["lr"] = self.rate(step)
        clock = [time.perf_counter()]
        chosen = self.shard.indices(step)
        x = self.task.inputs(self.tensors["train_x"][chosen], self.shard.rng(step))
        y = self.tensors["train_y"][chosen]
        clock.append(time.perf_counter())
        self.transforms.before_step(evaluated=due(settings, step + 1))
        scale = precision.scale
        optimizer.zero_grad()
        x, y, share, earlier = settings.large_batch.ahead(self.model, x, y, precision)
        with precision.autocast():
            loss = share * cross_entropy(self.model(x), y)
        clock.append(time.perf_counter())
        precision.backward(loss)
        clock.append(time.perf_counter())
        optimizer.note_loss(loss.item() + earlier)
        with explained(optimizer, step + 1):
            precision.step(optimizer)
        clock.append(time.perf_counter())

        before, self.stats, notes = self.stats, optimizer.stats(), optimizer.notes()
        self.done = step + 1
        if self.patience_s is not None:  # after a loss, continue from the most advanced rank's step
            self.done = max(self.done, self.stats.steps)
        names = ("data_s", "forward_s", "backward_s", "update_s")
        seconds = {name: end - start for name, start, end in zip(names, clock, clock[1:], strict=False)}
        event = (
            {"kind": "step", "loss": loss.item() + earlier, "step_s": clock[-1] - clock[0]}
            | seconds
            | spent(before, self.stats, with_noise=not settings.large_batch.shares_examples)
            | precision.event_fields(scale)
            | ({"notes": notes} if notes else {})
        )
        return [event, *(self.transforms.events() if self.rank == 0 else ())]

    def evaluate(self) -> Event:
        with self.optimizer.averaged() as distance:
            self.living = self.optimizer.notes().get("living", self.living)
            if self.patience_s is None:
                share_buffers(self.plain)
            with self.precision.autocast(), self.transforms.evaluating():
                place = self.living.index(self.rank), len(self.living)
                tested = evaluate(self.plain, self.task, self.tensors, *place)
        return tested | {"consensus": distance} | self.transforms.figures()

    def state_dict(self) -> dict[str, Any]:
        memory = self.optimizer.state_dict()  # first: it receives pending messages into the model
        return {
            "model": self.plain.state_dict(),
            "optimizer": memory,
            "precision": self.precision.state_dict(),
            **self.transforms.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        done = check_same(self.settings, state)
        self.plain.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.precision.load_state_dict(state.get("precision", {}))
        self.transforms.load_state_dict(state)
        self.stats, self.done = self.optimizer.stats(), done


def shard_of(
    settings: TrainingSettings, task: Task, tensors: Tensors, rank: int, size: int
) -> Shard | SkewedShard:
    labels = tensors["train_y"]
    if settings.skew is None:
        return Shard(len(labels), settings.batch, rank, size, settings.seed)
    return SkewedShard.of(task.kinds(labels), settings.batch, rank, size, settings.skew, settings.seed)
