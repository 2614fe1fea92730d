"""One rank's training loop: steps, measurements, evaluations, checkpoints.

Every rank emits one event a step and one an evaluation; whoever listens adds the ranks up. Rank 0 says first
with which optimiser it trains. Batches,
augmentation and learning rates are functions of (seed, rank, step), so that a resumed training does the
same bits.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.core.errors import NonFiniteError, StateError
from laconic.optim.prox import zero_share
from laconic.strategies import checkpoint
from laconic.strategies.ddp import compress
from laconic.strategies.handle import Handle
from laconic.strategies.method import lift
from laconic.tasks.catalogue import find
from laconic.tasks.loading import mapped
from laconic.tasks.plan import Emit, Event, Plan
from laconic.tasks.shard import Shard
from laconic.tasks.task import Task, Tensors, cross_entropy, right_answers

TEST_BATCH = 500
COUNTED = ("payload_sent", "payload_received", "wire_sent", "wire_received", "dense")
TIMED = ("encode_s", "communicate_s", "decode_s")


def train_rank(plan: Plan, emit: Emit) -> None:
    """Train as one rank of the default process group, and emit what happens."""
    rank, size = dist.get_rank(), dist.get_world_size()
    task, tensors = find(plan.task), mapped(plan.data)
    recipe = task.recipe(plan.model)
    torch.manual_seed(plan.seed)  # every rank builds the same model
    model = DistributedDataParallel(recipe.build())
    method = lift(plan.spec)
    optimizer = recipe.optimizer(model, plan.lr, method)
    highest = float(optimizer.param_groups[0]["lr"])
    handle = compress(model, optimizer, method, seed=plan.seed)
    shard = Shard(len(tensors["train_y"]), plan.batch, rank, size, plan.seed)

    first = 0
    if plan.resume_from is not None:
        state = checkpoint.load(plan.resume_from, rank=rank, size=size)
        first = restore(plan, state, model, optimizer, handle)

    if rank == 0:
        emit({"kind": "start", "step": first, "optimiser": type(optimizer).__name__, "lr": highest})
    before, sent_before = measured(handle), handle.stats().phases
    for step in range(first, plan.steps):
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
        step_or_say(optimizer, step + 1)
        clock.append(time.perf_counter())

        now, phases, done = measured(handle), handle.stats().phases, step + 1
        spent = {name: now[name] - before[name] for name in now}
        names = ("data_s", "forward_s", "backward_s", "update_s")
        seconds = {name: end - start for name, start, end in zip(names, clock, clock[1:], strict=False)}
        emit(
            {"kind": "step", "step": done, "loss": loss.item(), "step_s": clock[-1] - clock[0]}
            | seconds
            | spent
            | {"phases": {name: total - sent_before.get(name, 0) for name, total in phases.items()}}
        )
        before, sent_before = now, phases
        if done == plan.steps or (plan.eval_every and done % plan.eval_every == 0):
            emit(evaluate(model, task, tensors, rank, size) | {"step": done})
        if plan.checkpoint_every and done % plan.checkpoint_every == 0:
            state = captured(plan, done, model, optimizer, handle)
            checkpoint.save(plan.folder, state, step=done, rank=rank, size=size, barrier=dist.barrier)


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


def measured(handle: Handle) -> dict[str, float]:
    """The handle's counters, cumulative: bytes, and seconds in each phase of the exchange."""
    stats = handle.stats()
    return {name: getattr(stats, name) for name in COUNTED + TIMED}


def evaluate(model: DistributedDataParallel, task: Task, tensors: Tensors, rank: int, size: int) -> Event:
    """This rank's share of the test set: right answers, sum of losses, answers; with rank 0's buffers.

    `zeros`: share of the weights that are exactly zero.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    plain: nn.Module = model.module
    plain.eval()
    right, total, answers = 0, 0.0, 0
    x, y = tensors["test_x"][rank::size], tensors["test_y"][rank::size]
    with torch.no_grad():
        for start in range(0, len(y), TEST_BATCH):
            logits = plain(task.inputs(x[start : start + TEST_BATCH], None))
            labels = y[start : start + TEST_BATCH]
            right += right_answers(logits, labels)
            total += F.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), reduction="sum").item()
            answers += labels.numel()
    plain.train()
    zeros = zero_share([weight.detach() for weight in plain.parameters() if weight.dim() > 1])
    return {"kind": "eval", "right": right, "loss_sum": total, "answers": answers, "zeros": zeros}


def captured(
    plan: Plan,
    step: int,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    handle: Handle,
) -> dict[str, Any]:
    """All that this rank needs to go on after `step` steps."""
    return {
        "plan": plan.signature,
        "step": step,
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "handle": handle.state_dict(),
    }


def restore(
    plan: Plan,
    state: dict[str, Any],
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    handle: Handle,
) -> int:
    """Take a captured state back; the steps that were done. Raises `StateError` for another plan's."""
    for name, value in plan.signature.items():
        if state["plan"].get(name) != value:
            raise StateError(
                f"{plan.resume_from} was trained with {name}={state['plan'].get(name)!r}, not {value!r}: "
                "give the same settings, or another --name"
            )
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    handle.load_state_dict(state["handle"])
    done: int = state["step"]
    return done
