"""One rank's training loop for a pipeline.

Only last stages have the loss. A replica sees the same examples in every epoch, so that buffers by example
stay useful. For an evaluation, every rank receives the whole model, uncompressed.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from laconic.core.turn import mix
from laconic.pipeline.crossing import crossing
from laconic.strategies.distributed_optimizer import DistributedOptimizer
from laconic.tools.tasks import checkpoint
from laconic.tools.tasks.catalogue import find
from laconic.tools.tasks.decisions import Decisions
from laconic.tools.tasks.evaluation import evaluate
from laconic.tools.tasks.group_model import save_model
from laconic.tools.tasks.loading import mapped
from laconic.tools.tasks.measured_stage import Passed
from laconic.tools.tasks.resuming import check_same
from laconic.tools.tasks.settings import Emit, TrainingSettings
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.stage import StageAtWork
from laconic.tools.tasks.steps import due, explained, spent


def train_stage(settings: TrainingSettings, emit: Emit) -> list[int]:
    """Train as one rank, emit events, and return all ranks."""
    rank, size, pipeline = dist.get_rank(), dist.get_world_size(), settings.pipeline
    assert pipeline is not None
    task, tensors = find(settings.task), mapped(settings.data)
    recipe = task.recipe(settings.model)
    torch.manual_seed(settings.seed)  # every rank builds the same model
    whole = recipe.build()
    replica = pipeline.replica(rank)
    own = torch.arange(len(tensors["train_y"]), dtype=torch.int64, device="cpu")[replica :: pipeline.replicas]
    order = Shard(len(own), settings.batch, 0, 1, mix(settings.seed, replica))
    example = task.inputs(tensors["train_x"][: settings.batch], None)
    work = StageAtWork(
        pipeline,
        recipe,
        whole,
        example,
        crossing=crossing(settings.spec),
        samples=-(-len(tensors["train_y"]) // pipeline.replicas),  # equal on all ranks
        lr=settings.lr,
        seed=settings.seed,
    )
    peak_lr = float(work.optimizer.param_groups[0]["lr"])

    first = 0
    if settings.resume_from is not None:
        state = checkpoint.load(settings.resume_from, rank=rank, size=size)
        first = check_same(settings, state)
        work.load_state_dict(state)
    if rank == 0:
        inner = work.optimizer
        kind = type(inner.optimizer if isinstance(inner, DistributedOptimizer) else inner).__name__
        emit({"kind": "start", "step": first, "optimiser": kind, "lr": peak_lr})

    decisions = Decisions()
    for step in range(first, settings.steps):
        for group in work.optimizer.param_groups:
            group["lr"] = recipe.rate(peak_lr, step, settings.steps)
        before, exchanged = work.passed(), work.replicas()
        clock = [time.perf_counter()]
        ids = order.indices(step)
        chosen = own[ids]
        x, y = task.inputs(tensors["train_x"][chosen], None), tensors["train_y"][chosen]
        clock.append(time.perf_counter())
        work.optimizer.zero_grad()
        with explained(work.optimizer, step + 1, "activations or gradients"):
            loss = work.step(x, y, ids)
        clock.append(time.perf_counter())
        with explained(work.optimizer, step + 1):
            work.update()
        clock.append(time.perf_counter())

        done, passed = step + 1, work.passed().minus(before)
        event = {"kind": "step", "step": done, "loss": loss, "step_s": clock[-1] - clock[0]}
        event |= {"data_s": clock[1] - clock[0], "update_s": clock[3] - clock[2]}
        emit(event | _spent(passed, clock[2] - clock[1], spent(exchanged, work.replicas())))
        for decision in decisions.pop_all():
            emit({"kind": "decision", "step": done, "message": decision})
        if due(settings, done):
            with work.averaged() as distance:
                work.gather()
                tested = evaluate(whole, task, tensors, rank, size)
            emit(tested | {"step": done, "consensus": distance})
        if settings.checkpoint_every and done % settings.checkpoint_every == 0:
            kept = {"settings": settings.signature, "step": done} | work.state_dict()
            checkpoint.save(settings.folder, kept, step=done, rank=rank, size=size, barrier=dist.barrier)
    decisions.close()
    if isinstance(work.optimizer, DistributedOptimizer):
        work.optimizer.finish()
    if settings.checkpoint_every:
        work.gather()
        if rank == 0:
            save_model(settings.folder, whole)
    return [*range(size)]


def _spent(passed: Passed, schedule_s: float, exchanged: dict[str, Any]) -> dict[str, Any]:
    """Return a step's seconds and bytes. `schedule_s`: forward, backward and waiting."""
    busy_s = passed.forward_s + passed.backward_s + passed.encode_s + passed.decode_s
    waited = max(schedule_s - busy_s, 0.0)
    up, down = passed.activations, passed.gradients
    dense = passed.dense_activations.wire + passed.dense_gradients.wire
    return {
        "forward_s": passed.forward_s,
        "backward_s": passed.backward_s,
        "encode_s": passed.encode_s + exchanged["encode_s"],
        "communicate_s": waited + exchanged["communicate_s"],
        "decode_s": passed.decode_s + exchanged["decode_s"],
        "waited_s": waited,
        "payload_sent": up.sent_bytes + down.sent_bytes + exchanged["payload_sent"],
        "payload_received": up.received_bytes + down.received_bytes + exchanged["payload_received"],
        "network_sent": up.wire + down.wire + exchanged["network_sent"],
        "network_received": up.received_bytes + down.received_bytes + exchanged["network_received"],
        "dense": dense + exchanged["dense"],
        "activations_sent": up.wire,
        "gradients_sent": down.wire,
        "replicas_sent": exchanged["network_sent"],
        "phases": exchanged["phases"],
    }
