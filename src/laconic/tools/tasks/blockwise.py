"""One rank's training loop for Block-ADMM.

Ranks emit one event per step and per evaluation. Steps are those of the last block: earlier ticks fill the
blocks, and later ones empty them. A step has as many examples as with a method on as many workers.
"""

from __future__ import annotations

import time
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist

from laconic.admm import BlockTrainer, Stats
from laconic.admm.block_admm import BlockAdmm
from laconic.admm.stats import Messages
from laconic.comm.wire_model import PacketModel
from laconic.core.spec import parse
from laconic.tools.tasks import checkpoint
from laconic.tools.tasks.catalogue import find
from laconic.tools.tasks.evaluation import evaluate
from laconic.tools.tasks.group_model import save_model
from laconic.tools.tasks.loading import mapped
from laconic.tools.tasks.resuming import check_same
from laconic.tools.tasks.settings import Emit, Event, TrainingSettings
from laconic.tools.tasks.shard import Shard
from laconic.tools.tasks.steps import due, explained
from laconic.tools.tasks.task import cross_entropy

PACKETS = PacketModel()
LR = 1e-3  # of Adam: a task's rate does not fit, as targets of blocks are scaled differently from the loss


def is_blockwise(spec: str) -> bool:
    return isinstance(parse(spec), BlockAdmm)


def train_blocks(settings: TrainingSettings, emit: Emit) -> list[int]:
    """Train as one rank, emit events, and return all ranks."""
    rank, size, spec = dist.get_rank(), dist.get_world_size(), parse(settings.spec)
    assert isinstance(spec, BlockAdmm)
    task, tensors = find(settings.task), mapped(settings.data)
    recipe, peak_lr = task.recipe(settings.model), LR if settings.lr is None else settings.lr
    torch.manual_seed(settings.seed)  # every rank builds the same model
    whole = recipe.build()
    stored = spec.mode == "batch"
    trainer = BlockTrainer(
        whole,
        spec,
        example=task.inputs(tensors["train_x"][:2], None),
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=peak_lr),
        samples=len(tensors["train_y"]) if stored else None,
        folder=settings.folder / "rows" if stored else None,
        seed=settings.seed,
    )
    order = Shard(len(tensors["train_y"]), settings.batch * size, 0, 1, settings.seed)
    tick = 0
    if settings.resume_from is not None:
        state = checkpoint.load(settings.resume_from, rank=rank, size=size)
        tick = check_same(settings, state) + trainer.last
        trainer.load_state_dict(state["blocks"])
    if rank == 0:
        emit({"kind": "start", "step": max(0, tick - trainer.last), "optimiser": "Adam", "lr": peak_lr})
    before, began = trainer.stats(), time.perf_counter()
    while tick < settings.steps + trainer.last:
        own = min(
            max(0, tick - trainer.delay + rank), settings.steps - 1
        )  # the step whose batch this block trains on
        for group in trainer.optimizer.param_groups:
            group["lr"] = recipe.rate(peak_lr, min(max(0, own), settings.steps - 1), settings.steps)
        loss, data_s = None, 0.0
        with explained(trainer.optimizer, tick + 1, "activations or targets"):
            if tick < settings.steps:
                loading = time.perf_counter()
                ids = order.indices(tick)
                x, y = task.inputs(tensors["train_x"][ids], order.rng(tick)), tensors["train_y"][ids]
                data_s = time.perf_counter() - loading
                loss = trainer.step(x, y, ids)
            else:
                loss = trainer.drain()
        tick += 1
        done = tick - trainer.last
        if done < 1:
            continue
        now = trainer.stats()
        event = {"kind": "step", "step": done, "loss": loss, "step_s": time.perf_counter() - began}
        emit(event | {"data_s": data_s} | step_costs(before, now) | {"blocks": at_work(trainer, before, now)})
        if done == settings.steps:
            trainer.finish()
        if due(settings, done):
            emit(evaluate(trainer.gather(), task, tensors, rank, size) | {"step": done, "consensus": 0.0})
        if settings.checkpoint_every and done % settings.checkpoint_every == 0:
            kept = {"settings": settings.signature, "step": done, "blocks": trainer.state_dict()}
            checkpoint.save(settings.folder, kept, step=done, rank=rank, size=size, barrier=dist.barrier)
        before, began = now, time.perf_counter()
    if settings.checkpoint_every:
        model = trainer.gather()
        if rank == 0:
            save_model(settings.folder, model)
    trainer.close()
    return [*range(size)]


def step_costs(before: Stats, now: Stats) -> Event:
    """Return a step's seconds and bytes. Sub-problems, with their backward passes, count as backward."""
    up, back = _since(before.activations, now.activations), _since(before.targets, now.targets)
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
        "network_sent": wire(up) + wire(back),
        "network_received": up.received_bytes + back.received_bytes,
        "dense": wire(up, up.dense_bytes) + wire(back, back.dense_bytes),
        "phases": {},
    }


def at_work(trainer: BlockTrainer, before: Stats, now: Stats) -> dict[str, Any]:
    return {
        "primal": now.primal,
        "dual": now.dual,
        "activations_sent": wire(_since(before.activations, now.activations)),
        "targets_sent": wire(_since(before.targets, now.targets)),
        "spans": [list(astuple(span)) for span in trainer.spans()],
    }


def wire(messages: Messages, nbytes: int | None = None) -> int:
    """Return the network bytes that a rank sends, with headers and acknowledgements."""
    sent = messages.sent_bytes if nbytes is None else nbytes
    forth = messages.sent * PACKETS.forth(-(-sent // max(messages.sent, 1)))
    return forth + messages.received * PACKETS.back(-(-messages.received_bytes // max(messages.received, 1)))


def _since(before: Messages, now: Messages) -> Messages:
    pairs = zip(astuple(now), astuple(before), strict=True)
    return Messages(*(after - earlier for after, earlier in pairs))
