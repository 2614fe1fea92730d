"""One rank's training loop: steps, measurements, evaluations, checkpoints.

Every rank emits one event per step and per evaluation. Evaluation uses the ranks' average model. Batches,
augmentation and learning rates depend on (seed, rank, step), so a resumed training computes the same bits.
"""

from __future__ import annotations

import time
from functools import partial

import torch
import torch.distributed as dist

from laconic.core.turn import mix
from laconic.strategies.distribute import distribute, strategy_or_method
from laconic.tools.tasks import checkpoint
from laconic.tools.tasks.catalogue import find
from laconic.tools.tasks.decisions import Decisions
from laconic.tools.tasks.evaluation import evaluate
from laconic.tools.tasks.group_model import built, save_model, share_buffers
from laconic.tools.tasks.loading import mapped
from laconic.tools.tasks.precision import Precision
from laconic.tools.tasks.resuming import captured, restore
from laconic.tools.tasks.settings import Emit, TrainingSettings
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.skew import SkewedShard
from laconic.tools.tasks.steps import due, explained, spent
from laconic.tools.tasks.task import Task, Tensors, cross_entropy
from laconic.tools.tasks.transforms import Transforms, attach_all


def train_rank(settings: TrainingSettings, emit: Emit) -> list[int]:
    """Train as one rank, emit events, and return the remaining ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    task, tensors = find(settings.task), mapped(settings.data)
    recipe = task.recipe(settings.model)
    torch.manual_seed(settings.seed)  # every rank builds the same model
    plain = built(recipe, settings.bits, mix(settings.seed, rank))
    spec = strategy_or_method(settings.spec)
    sizes = {"batch": settings.batch * size, "base_batch": task.batch * size, "steps": settings.steps}
    updates, peak_lr, rate = settings.large_batch.optimizer(plain, recipe, spec, lr=settings.lr, **sizes)
    patience_s = settings.patience_of(spec)
    quorum = settings.quorum_of(spec)
    precision = Precision(settings.precision)
    early = attach_all(settings, plain, updates, distributed=False)
    model, optimizer = distribute(
        plain,
        updates,
        spec,
        seed=settings.seed,
        patience_s=patience_s,
        quorum=quorum,
        scaler=precision.scaler,
    )
    transforms = Transforms(early | attach_all(settings, model, updates, distributed=True))
    shard = settings.large_batch.shard(partial(shard_of, settings, task, tensors), rank, size)

    first = optimizer.stats().steps  # above 0 if this worker replaces a dead one
    if first:
        emit({"kind": "back", "step": first})
    if settings.resume_from is not None:
        state = checkpoint.load(settings.resume_from, rank=rank, size=size)
        first = restore(settings, state, plain, optimizer, precision, transforms)

    if rank == 0:
        kind = type(optimizer.optimizer).__name__
        emit({"kind": "start", "step": first, "optimiser": kind, "lr": peak_lr})
    before, step, living, decisions = optimizer.stats(), first, [*range(size)], Decisions()
    with transforms.training():
        while step < settings.steps:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            clock = [time.perf_counter()]
            chosen = shard.indices(step)
            x, y = task.inputs(tensors["train_x"][chosen], shard.rng(step)), tensors["train_y"][chosen]
            clock.append(time.perf_counter())
            transforms.before_step(evaluated=due(settings, step + 1))
            scale = precision.scale
            optimizer.zero_grad()
            x, y, share, earlier = settings.large_batch.ahead(model, x, y, precision)
            with precision.autocast():
                loss = share * cross_entropy(model(x), y)
            clock.append(time.perf_counter())
            precision.backward(loss)
            clock.append(time.perf_counter())
            optimizer.note_loss(loss.item() + earlier)
            with explained(optimizer, step + 1):
                precision.step(optimizer)
            clock.append(time.perf_counter())

            now, notes, done = optimizer.stats(), optimizer.notes(), step + 1
            if patience_s is not None:
                done = max(done, now.steps)  # after a loss, all continue from the most advanced rank's step
            names = ("data_s", "forward_s", "backward_s", "update_s")
            seconds = {name: end - start for name, start, end in zip(names, clock, clock[1:], strict=False)}
            emit(
                {"kind": "step", "step": done, "loss": loss.item() + earlier, "step_s": clock[-1] - clock[0]}
                | seconds
                | spent(before, now, with_noise=not settings.large_batch.shares_examples)
                | precision.event_fields(scale)
                | ({"notes": notes} if notes else {})
            )
            for event in transforms.events() if rank == 0 else ():
                emit(event | {"step": done})
            for decision in decisions.pop_all():
                emit({"kind": "decision", "step": done, "message": decision})
            before = now
            if due(settings, done):
                with optimizer.averaged() as distance:
                    living = optimizer.notes().get("living", living)
                    if patience_s is None:
                        share_buffers(plain)
                    with precision.autocast(), transforms.evaluating():
                        tested = evaluate(plain, task, tensors, living.index(rank), len(living))
                emit(tested | {"step": done, "consensus": distance} | transforms.figures())
            if settings.checkpoint_every and done % settings.checkpoint_every == 0:
                state = captured(settings, done, plain, optimizer, precision, transforms)
                checkpoint.save(settings.folder, state, step=done, rank=rank, size=size, barrier=dist.barrier)
            step = done
    decisions.close()
    optimizer.finish()
    for event in transforms.finish(settings.folder, rank):
        emit(event | {"step": step})
    if settings.checkpoint_every and rank == 0:
        save_model(settings.folder, plain)
    return optimizer.notes().get("living", living)  # type: ignore[no-any-return]  # notes are of any type


def shard_of(
    settings: TrainingSettings, task: Task, tensors: Tensors, rank: int, size: int
) -> Shard | SkewedShard:
    labels = tensors["train_y"]
    if settings.skew is None:
        return Shard(len(labels), settings.batch, rank, size, settings.seed)
    return SkewedShard.of(task.kinds(labels), settings.batch, rank, size, settings.skew, settings.seed)
