"""Training of a pipeline's stage on each rank.

A replica sees the same examples in every epoch, so buffers by example stay useful.
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
from laconic.tools.tasks.evaluation import evaluate
from laconic.tools.tasks.group_model import save_model
from laconic.tools.tasks.loading import mapped
from laconic.tools.tasks.loop import train
from laconic.tools.tasks.measured_stage import Passed
from laconic.tools.tasks.resuming import check_same
from laconic.tools.tasks.settings import Emit, Event, TrainingSettings
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.stage import StageAtWork
from laconic.tools.tasks.steps import explained, spent


def train_stage(settings: TrainingSettings, emit: Emit) -> list[int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = Stage(settings)
    if settings.resume_from is not None:
        stage.restore(checkpoint.load(settings.resume_from, rank=rank, size=size))
    work = stage.work
    inner = work.optimizer
    if rank == 0:
        kind = type(inner.optimizer if isinstance(inner, DistributedOptimizer) else inner).__name__
        emit({"kind": "start", "step": stage.done, "optimiser": kind, "lr": stage.peak_lr})
    train(settings, stage, emit)
    if isinstance(inner, DistributedOptimizer):
        inner.finish()
    if settings.checkpoint_every:
        work.gather()
        if rank == 0:
            save_model(settings.folder, work.whole)
    return [*range(size)]


class Stage:
    def __init__(self, settings: TrainingSettings) -> None:
        pipeline = settings.pipeline
        assert pipeline is not None
        self.settings, self.done = settings, 0
        self.task, self.tensors = find(settings.task), mapped(settings.data)
        self.recipe = self.task.recipe(settings.model)
        torch.manual_seed(settings.seed)
        whole = self.recipe.build()
        replica, examples = pipeline.replica(dist.get_rank()), len(self.tensors["train_y"])
        every = torch.arange(examples, dtype=torch.int64, device="cpu")
        self.own = every[replica :: pipeline.replicas]
        self.order = Shard(len(self.own), settings.batch, 0, 1, mix(settings.seed, replica))
        self.work = StageAtWork(
            pipeline,
            self.recipe,
            whole,
            self.task.inputs(self.tensors["train_x"][: settings.batch], None),
            crossing=crossing(settings.spec),
            samples=-(-examples // pipeline.replicas),
            lr=settings.lr,
            seed=settings.seed,
        )
        self.peak_lr = float(self.work.optimizer.param_groups[0]["lr"])

    def step(self) -> list[Event]:
        work, step = self.work, self.done
        for group in work.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.peak_lr, step, self.settings.steps)
        before, exchanged = work.passed(), work.replicas()
        clock = [time.perf_counter()]
        ids = self.order.indices(step)
        chosen = self.own[ids]
        x, y = self.task.inputs(self.tensors["train_x"][chosen], None), self.tensors["train_y"][chosen]
        clock.append(time.perf_counter())
        work.optimizer.zero_grad()
        with explained(work.optimizer, step + 1, "activations or gradients"):
            loss = work.step(x, y, ids)
        clock.append(time.perf_counter())
        with explained(work.optimizer, step + 1):
            work.update()
        clock.append(time.perf_counter())

        self.done = step + 1
        event = {"kind": "step", "loss": loss, "step_s": clock[-1] - clock[0]}
        event |= {"data_s": clock[1] - clock[0], "update_s": clock[3] - clock[2]}
        passed = work.passed().minus(before)
        return [event | _spent(passed, clock[2] - clock[1], spent(exchanged, work.replicas()))]

    def evaluate(self) -> Event:
        with self.work.averaged() as distance:
            self.work.gather()
            ranks = dist.get_rank(), dist.get_world_size()
            return evaluate(self.work.whole, self.task, self.tensors, *ranks) | {"consensus": distance}

    def state_dict(self) -> dict[str, Any]:
        return self.work.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        self.done = check_same(self.settings, state)
        self.work.load_state_dict(state)


def _spent(passed: Passed, schedule_s: float, exchanged: dict[str, Any]) -> dict[str, Any]:
    busy_s = passed.forward_s + passed.backward_s + passed.encode_s + passed.decode_s
    waited = max(schedule_s - busy_s, 0.0)
    up, down = passed.activations, passed.gradients
    dense = passed.dense_activations.network_sent + passed.dense_gradients.network_sent
    return {
        "forward_s": passed.forward_s,
        "backward_s": passed.backward_s,
        "encode_s": passed.encode_s + exchanged["encode_s"],
        "communicate_s": waited + exchanged["communicate_s"],
        "decode_s": passed.decode_s + exchanged["decode_s"],
        "waited_s": waited,
        "payload_sent": up.sent_bytes + down.sent_bytes + exchanged["payload_sent"],
        "payload_received": up.received_bytes + down.received_bytes + exchanged["payload_received"],
        "network_sent": up.network_sent + down.network_sent + exchanged["network_sent"],
        "network_received": up.network_received + down.network_received + exchanged["network_received"],
        "dense": dense + exchanged["dense"],
        "activations_sent": up.network_sent,
        "gradients_sent": down.network_sent,
        "replicas_sent": exchanged["network_sent"],
        "phases": exchanged["phases"],
    }
