"""Training of a block on each rank, by Block-ADMM."""

from __future__ import annotations

import time
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist

from laconic.admm import BlockTrainer, Stats
from laconic.admm.block_admm import BlockAdmm
from laconic.core.spec import parse
from laconic.tools.tasks import checkpoint
from laconic.tools.tasks.catalogue import find
from laconic.tools.tasks.evaluation import evaluate
from laconic.tools.tasks.group_model import save_model
from laconic.tools.tasks.loading import mapped
from laconic.tools.tasks.loop import train
from laconic.tools.tasks.resuming import check_same
from laconic.tools.tasks.settings import Emit, Event, TrainingSettings
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.steps import explained
from laconic.tools.tasks.task import cross_entropy

LR = 1e-3  # of Adam: targets of blocks are scaled differently from the loss


def is_blockwise(spec: str) -> bool:
    return isinstance(parse(spec), BlockAdmm)


def train_blocks(settings: TrainingSettings, emit: Emit) -> list[int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    work = Block(settings)
    if settings.resume_from is not None:
        work.restore(checkpoint.load(settings.resume_from, rank=rank, size=size))
    if rank == 0:
        emit({"kind": "start", "step": max(0, work.done), "optimiser": "Adam", "lr": work.peak_lr})
    train(settings, work, emit)
    if settings.checkpoint_every:
        model = work.trainer.gather()
        if rank == 0:
            save_model(settings.folder, model)
    work.trainer.close()
    return [*range(size)]


class Block:
    """A rank's block. `done`: completed steps of the last block; negative while earlier blocks are filled."""

    def __init__(self, settings: TrainingSettings) -> None:
        spec = parse(settings.spec)
        assert isinstance(spec, BlockAdmm)
        self.settings = settings
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.task, self.tensors = find(settings.task), mapped(settings.data)
        self.recipe = self.task.recipe(settings.model)
        self.peak_lr = LR if settings.lr is None else settings.lr
        torch.manual_seed(settings.seed)
        stored, examples = spec.mode == "batch", len(self.tensors["train_y"])
        self.trainer = BlockTrainer(
            self.recipe.build(),
            spec,
            example=self.task.inputs(self.tensors["train_x"][:2], None),
            loss=cross_entropy,
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=self.peak_lr),
            samples=examples if stored else None,
            folder=settings.folder / "rows" if stored else None,
            seed=settings.seed,
        )
        self.order = Shard(examples, settings.batch * self.size, 0, 1, settings.seed)
        self.done = -self.trainer.last

    def step(self) -> list[Event]:
        before, began = self.trainer.stats(), time.perf_counter()
        loss, data_s = self._tick()
        while self.done < 1:
            loss, data_s = self._tick()
        step_s, now = time.perf_counter() - began, self.trainer.stats()
        event = {"kind": "step", "loss": loss, "step_s": step_s, "data_s": data_s}
        event |= step_costs(before, now) | {"blocks": at_work(self.trainer, before, now)}
        return [event]

    def _tick(self) -> tuple[float | None, float]:
        trainer, steps, data_s = self.trainer, self.settings.steps, 0.0
        tick = self.done + trainer.last
        trained = min(max(0, tick - trainer.delay + self.rank), steps - 1)
        for group in trainer.optimizer.param_groups:
            group["lr"] = self.recipe.rate(self.peak_lr, trained, steps)
        with explained(trainer.optimizer, tick + 1, "activations or targets"):
            if tick < steps:
                loading = time.perf_counter()
                ids = self.order.indices(tick)
                x = self.task.inputs(self.tensors["train_x"][ids], self.order.rng(tick))
                data_s = time.perf_counter() - loading
                loss = trainer.step(x, self.tensors["train_y"][ids], ids)
            else:
                loss = trainer.drain()
        self.done += 1
        return loss, data_s

    def evaluate(self) -> Event:
        """Test the model of all blocks; after the last step, finish first. Collective."""
        if self.done == self.settings.steps:
            self.trainer.finish()
        tested = evaluate(self.trainer.gather(), self.task, self.tensors, self.rank, self.size)
        return tested | {"consensus": 0.0}

    def state_dict(self) -> dict[str, Any]:
        return {"blocks": self.trainer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.done = check_same(self.settings, state)
        self.trainer.load_state_dict(state["blocks"])


def step_costs(before: Stats, now: Stats) -> Event:
    """Return a step's costs. Sub-problems count as backward."""
    up, back = now.activations.minus(before.activations), now.targets.minus(before.targets)
    waited = now.waited_s - before.waited_s
    return {
        "forward_s": now.forward_s - before.forward_s,
        "backward_s": now.update_s - before.update_s,
        "update_s": 0.0,
        "encode_s": now.encode_s - before.encode_s,
        "communicate_s": waited,
        "decode_s": now.decode_s - before.decode_s,
        "waited_s": waited,
        "payload_sent": up.sent_bytes + back.sent_bytes,
        "payload_received": up.received_bytes + back.received_bytes,
        "network_sent": up.network_sent + back.network_sent,
        "network_received": up.network_received + back.network_received,
        "dense": up.network_dense + back.network_dense,
        "phases": {},
    }


def at_work(trainer: BlockTrainer, before: Stats, now: Stats) -> dict[str, Any]:
    return {
        "primal": now.primal,
        "dual": now.dual,
        "activations_sent": now.activations.minus(before.activations).network_sent,
        "targets_sent": now.targets.minus(before.targets).network_sent,
        "spans": [list(astuple(span)) for span in trainer.spans()],
    }
