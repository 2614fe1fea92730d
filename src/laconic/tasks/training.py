"""One rank's training loop: steps, measurements, evaluations, checkpoints.

Every rank emits one event a step and one an evaluation; whoever listens adds the ranks up. Rank 0 says first
with which optimiser it trains. What is tested is the group's model: the average, where ranks have their own.
Batches, augmentation and learning rates are functions of (seed, rank, step), so that a resumed training does
the same bits.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from laconic.core.errors import AttachError, NonFiniteError, StateError
from laconic.core.turn import mix
from laconic.lowbit import convert
from laconic.optim.prox import zero_share
from laconic.strategies import checkpoint
from laconic.strategies.distribute import distribute, strategy_or_method
from laconic.strategies.distributed_optimizer import DistributedOptimizer
from laconic.strategies.stats import Stats
from laconic.tasks.catalogue import find
from laconic.tasks.decisions import Decisions
from laconic.tasks.loading import mapped
from laconic.tasks.plan import Emit, Event, Plan
from laconic.tasks.shard import Shard
from laconic.tasks.skew import SkewedShard
from laconic.tasks.task import Recipe, Task, Tensors, cross_entropy, right_answers

TEST_BATCH = 500
COUNTED = ("payload_sent", "payload_received", "wire_sent", "wire_received", "dense")
TIMED = ("encode_s", "communicate_s", "decode_s")
MODEL = "model.pt"  # in the plan's folder: the group's model after the last step


def train_rank(plan: Plan, emit: Emit) -> list[int]:
    """Train as one rank of the default process group, and emit what happens; the ranks that are left."""
    rank, size = dist.get_rank(), dist.get_world_size()
    task, tensors = find(plan.task), mapped(plan.data)
    recipe = task.recipe(plan.model)
    torch.manual_seed(plan.seed)  # every rank builds the same model
    plain = built(recipe, plan.bits, mix(plan.seed, rank))
    spec = strategy_or_method(plan.spec)
    updates, patience_s = recipe.optimizer(plain, plan.lr, spec), plan.patience_of(spec)
    model, optimizer = distribute(plain, updates, spec, seed=plan.seed, patience_s=patience_s)
    highest = float(optimizer.param_groups[0]["lr"])
    shard = shard_of(plan, task, tensors, rank, size)

    first = optimizer.stats().steps  # above 0 in the place of a worker that died
    if first:
        emit({"kind": "back", "step": first})
    if plan.resume_from is not None:
        state = checkpoint.load(plan.resume_from, rank=rank, size=size)
        first = restore(plan, state, plain, optimizer)

    if rank == 0:
        kind = type(optimizer.optimizer).__name__
        emit({"kind": "start", "step": first, "optimiser": kind, "lr": highest})
    before, step, living, decisions = optimizer.stats(), first, [*range(size)], Decisions()
    while step < plan.steps:
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(highest, step, plan.steps)
        clock = [time.perf_counter()]
        chosen = shard.indices(step)
        x, y = task.inputs(tensors["train_x"][chosen], shard.rng(step)), tensors["train_y"][chosen]
        clock.append(time.perf_counter())
        loss = cross_entropy(model(x), y)
        clock.append(time.perf_counter())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        clock.append(time.perf_counter())
        optimizer.note_loss(loss)
        step_or_say(optimizer, step + 1)
        clock.append(time.perf_counter())

        now, notes, done = optimizer.stats(), optimizer.notes(), step + 1
        if patience_s is not None:
            done = max(done, now.steps)  # after a loss all go on from the step of the one who was ahead
        names = ("data_s", "forward_s", "backward_s", "update_s")
        seconds = {name: end - start for name, start, end in zip(names, clock, clock[1:], strict=False)}
        emit(
            {"kind": "step", "step": done, "loss": loss.item(), "step_s": clock[-1] - clock[0]}
            | seconds
            | spent(before, now)
            | ({"notes": notes} if notes else {})
        )
        for said in decisions.take():
            emit({"kind": "said", "step": done, "said": said})
        before = now
        if done == plan.steps or (plan.eval_every and done % plan.eval_every == 0):
            with optimizer.averaged() as distance:
                living = optimizer.notes().get("living", living)
                if patience_s is None:
                    share_buffers(plain)
                tested = evaluate(plain, task, tensors, living.index(rank), len(living))
            emit(tested | {"step": done, "consensus": distance})
        if plan.checkpoint_every and done % plan.checkpoint_every == 0:
            state = captured(plan, done, plain, optimizer)
            checkpoint.save(plan.folder, state, step=done, rank=rank, size=size, barrier=dist.barrier)
        step = done
    decisions.close()
    optimizer.finish()
    if plan.checkpoint_every and rank == 0:
        save_model(plan.folder, plain)
    return optimizer.notes().get("living", living)  # type: ignore[no-any-return]  # notes are of any type


def built(recipe: Recipe, bits: int | None, seed: int = 0) -> nn.Module:
    """The model, in float32 or with layers of so many bits. `seed`: of their rounding, a rank's own.

    Raises `AttachError`, in the words of one who trains, for a model that has no such form.
    """
    model = recipe.build()
    if bits is None:
        return model
    try:
        return convert(model, bits, seed=seed)
    except AttachError as error:
        raise AttachError(f"--bits {bits} is not for this model: {error}") from error


def shard_of(plan: Plan, task: Task, tensors: Tensors, rank: int, size: int) -> Shard | SkewedShard:
    """The examples that this rank draws its batches from."""
    labels = tensors["train_y"]
    if plan.skew is None:
        return Shard(len(labels), plan.batch, rank, size, plan.seed)
    return SkewedShard.of(task.kinds(labels), plan.batch, rank, size, plan.skew, plan.seed)


def step_or_say(optimizer: torch.optim.Optimizer, step: int) -> None:
    """The optimiser's step. Raises `NonFiniteError`, in the words of one who trains, where it may not be."""
    try:
        optimizer.step()
    except NonFiniteError as error:
        rate = max(float(group["lr"]) for group in optimizer.param_groups)
        raise NonFiniteError(
            f"training has diverged: the gradients of step {step} are not finite, at a learning rate of"
            f" {rate:g}; give a lower --lr"
        ) from error


def spent(before: Stats, now: Stats) -> dict[str, Any]:
    """What was sent between two counts, and seconds in each phase of the exchange."""
    between = {name: getattr(now, name) - getattr(before, name) for name in COUNTED + TIMED}
    phases = {name: total - before.phases.get(name, 0) for name, total in now.phases.items()}
    return between | {"phases": phases}


def share_buffers(model: nn.Module) -> None:
    """Every rank takes rank 0's buffers."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def evaluate(model: nn.Module, task: Task, tensors: Tensors, rank: int, size: int) -> Event:
    """This rank's share of the test set: right answers, sum of losses, answers.

    `zeros`: share of the weights that are exactly zero.
    """
    model.eval()
    right, total, answers = 0, 0.0, 0
    x, y = tensors["test_x"][rank::size], tensors["test_y"][rank::size]
    with torch.no_grad():
        for start in range(0, len(y), TEST_BATCH):
            logits = model(task.inputs(x[start : start + TEST_BATCH], None))
            labels = y[start : start + TEST_BATCH]
            right += right_answers(logits, labels)
            total += F.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), reduction="sum").item()
            answers += labels.numel()
    model.train()
    zeros = zero_share([weight.detach() for weight in model.parameters() if weight.dim() > 1])
    return {"kind": "eval", "right": right, "loss_sum": total, "answers": answers, "zeros": zeros}


def captured(plan: Plan, step: int, model: nn.Module, optimizer: DistributedOptimizer) -> dict[str, Any]:
    """All that this rank needs to go on after `step` steps. Called by all ranks."""
    memory = optimizer.state_dict()  # first: what was under way arrives in the model
    return {"plan": plan.signature, "step": step, "model": model.state_dict(), "optimizer": memory}


def restore(plan: Plan, state: dict[str, Any], model: nn.Module, optimizer: DistributedOptimizer) -> int:
    """Take a captured state back; the steps that were done. Raises `StateError` for another plan's."""
    for name, value in plan.signature.items():
        if state["plan"].get(name) != value:
            raise StateError(
                f"{plan.resume_from} was trained with {name}={state['plan'].get(name)!r}, not {value!r}: "
                "give the same settings, or another --name"
            )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done: int = state["step"]
    return done


def save_model(folder: Path, model: nn.Module) -> None:
    """Write the group's model, whole or not at all."""
    beside = folder / f".{MODEL}"
    torch.save({name: part.clone() for name, part in model.state_dict().items()}, beside)
    beside.replace(folder / MODEL)
