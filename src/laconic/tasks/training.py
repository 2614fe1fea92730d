"""One rank's training loop: steps, measurements, evaluations, checkpoints.

Every rank emits one event per step and one per evaluation; the receiver adds them up over ranks. First,
rank 0 emits which optimiser it uses. Evaluation tests the group's model: the average, if ranks have their
own. Batches, augmentation and learning rates are functions of (seed, rank, step), so a resumed training
computes the same bits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from laconic.core.errors import AttachError, NonFiniteError, SpecError, StateError
from laconic.core.spec import parse
from laconic.core.turn import mix
from laconic.exchange.stats import Stats
from laconic.lowbit import FewBitHandle, convert
from laconic.lowbit.training import LowBitTraining, Trained
from laconic.optim.prox import zero_share
from laconic.sparsity import SparseTraining, sparsify
from laconic.strategies.distribute import distribute, strategy_or_method
from laconic.strategies.distributed_optimizer import DistributedOptimizer
from laconic.tasks import checkpoint
from laconic.tasks.catalogue import find
from laconic.tasks.decisions import Decisions
from laconic.tasks.keeping import Keeping
from laconic.tasks.loading import mapped
from laconic.tasks.precision import Precision
from laconic.tasks.settings import Emit, Event, TrainingSettings
from laconic.tasks.shard import Shard
from laconic.tasks.skew import SkewedShard
from laconic.tasks.task import Recipe, Task, Tensors, cross_entropy, right_answers

TEST_BATCH = 500
COUNTED = ("payload_sent", "payload_received", "network_sent", "network_received", "dense")
TIMED = ("encode_s", "communicate_s", "decode_s")
MODEL = "model.pt"  # in the training's folder: the group's model after the last step
PACKED = "packed.pt"  # beside it: the same with its weights in a few bits


def train_rank(settings: TrainingSettings, emit: Emit) -> list[int]:
    """Train as one rank of the default process group and emit events; returns the ranks that are left."""
    rank, size = dist.get_rank(), dist.get_world_size()
    task, tensors = find(settings.task), mapped(settings.data)
    recipe = task.recipe(settings.model)
    torch.manual_seed(settings.seed)  # every rank builds the same model
    plain = built(recipe, settings.bits, mix(settings.seed, rank))
    spec = strategy_or_method(settings.spec)
    sizes = {"batch": settings.batch * size, "base_batch": task.batch * size, "steps": settings.steps}
    updates, peak_lr, rate = settings.enlarged.optimizer(plain, recipe, spec, lr=settings.lr, **sizes)
    patience_s = settings.patience_of(spec)
    quorum = settings.quorum_of(spec)
    precision = Precision(settings.precision)
    lowbit = None if settings.lowbit is None else lowbit_attached(settings.lowbit, plain, updates)
    model, optimizer = distribute(
        plain,
        updates,
        spec,
        seed=settings.seed,
        patience_s=patience_s,
        quorum=quorum,
        scaler=precision.scaler,
    )
    sparse = sparsified(settings, model, updates)
    shard = settings.enlarged.shard(partial(shard_of, settings, task, tensors), rank, size)
    keeping = Keeping(plain, settings.activations, updates)

    first = optimizer.stats().steps  # above 0 if this worker replaces one that died
    if first:
        emit({"kind": "back", "step": first})
    if settings.resume_from is not None:
        state = checkpoint.load(settings.resume_from, rank=rank, size=size)
        first = restore(settings, state, plain, optimizer, sparse)
        precision.load_state_dict(state.get("precision", {}))
        if lowbit is not None:
            lowbit.load_state_dict(state["lowbit"])
        keeping.load_state_dict(state["keeping"])

    if rank == 0:
        kind = type(optimizer.optimizer).__name__
        emit({"kind": "start", "step": first, "optimiser": kind, "lr": peak_lr})
    before, step, living, decisions = optimizer.stats(), first, [*range(size)], Decisions()
    updated = -1 if sparse is None or first == 0 else sparse.updates
    with keeping.open():
        while step < settings.steps:
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            clock = [time.perf_counter()]
            chosen = shard.indices(step)
            x, y = task.inputs(tensors["train_x"][chosen], shard.rng(step)), tensors["train_y"][chosen]
            clock.append(time.perf_counter())
            if due(settings, step + 1):
                keeping.count()
            scale = precision.scale
            optimizer.zero_grad()
            x, y, share, earlier = settings.enlarged.ahead(model, x, y, precision)
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
                | spent(before, now, with_noise=not settings.enlarged.shares_examples)
                | precision.told(scale)
                | ({"notes": notes} if notes else {})
            )
            if sparse is not None and rank == 0 and sparse.updates > updated:
                updated = sparse.updates
                figures = sparse.stats()
                emit({"kind": "masks", "step": done, "density": figures.density, "changed": figures.changed})
            for decision in decisions.pop_all():
                emit({"kind": "decision", "step": done, "message": decision})
            before = now
            if due(settings, done):
                with optimizer.averaged() as distance:
                    living = optimizer.notes().get("living", living)
                    if patience_s is None:
                        share_buffers(plain)
                    quantised = contextlib.nullcontext() if lowbit is None else lowbit.quantised()
                    with precision.autocast(), quantised:
                        tested = evaluate(plain, task, tensors, living.index(rank), len(living))
                apart = {} if lowbit is None else {"residual": lowbit.residual()}
                if isinstance(lowbit, FewBitHandle):
                    apart["flips"] = lowbit.flips()
                emit(tested | keeping.counted() | {"step": done, "consensus": distance} | apart)
            if settings.checkpoint_every and done % settings.checkpoint_every == 0:
                state = captured(settings, done, plain, optimizer, sparse)
                state |= {"precision": precision.state_dict(), "keeping": keeping.state_dict()}
                state |= {} if lowbit is None else {"lowbit": lowbit.state_dict()}
                checkpoint.save(settings.folder, state, step=done, rank=rank, size=size, barrier=dist.barrier)
            step = done
    decisions.close()
    optimizer.finish()
    if lowbit is not None:
        lowbit.finish()
        if rank == 0:
            emit({"kind": "decision", "step": step, "message": save_packed(settings.folder, plain, lowbit)})
    if settings.checkpoint_every and rank == 0:
        save_model(settings.folder, plain)
    return optimizer.notes().get("living", living)  # type: ignore[no-any-return]  # notes are of any type


def due(settings: TrainingSettings, done: int) -> bool:
    """Whether the model is tested after so many steps."""
    return done == settings.steps or bool(settings.eval_every and done % settings.eval_every == 0)


def built(recipe: Recipe, bits: int | None, seed: int = 0) -> nn.Module:
    """The model, in float32 or with layers of `bits` bits. `seed`: for their rounding, differs by rank.

    Raises `AttachError`, naming --bits, if the model cannot be converted.
    """
    model = recipe.build()
    if bits is None:
        return model
    try:
        return convert(model, bits, seed=seed)
    except AttachError as error:
        raise AttachError(f"--bits {bits} does not work with this model: {error}") from error


def lowbit_attached(text: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
    """The low-bit training of this spec, at work. Raises `SpecError` or `AttachError`, naming --lowbit."""
    training = parse(text)
    if not isinstance(training, LowBitTraining):
        raise SpecError(f"--lowbit takes a low-bit training such as admm(table='ternary'), got {training!r}")
    try:
        return training.attach(model, optimizer)
    except AttachError as error:
        raise AttachError(f"--lowbit {text} does not work with this model: {error}") from error


def sparsified(
    settings: TrainingSettings, model: nn.Module, optimizer: torch.optim.Optimizer
) -> SparseTraining | None:
    """The masks on the model, if any are wanted. Raises `AttachError`, naming --sparsity, if it fails."""
    if settings.sparsity is None:
        return None
    try:
        return sparsify(model, optimizer, settings.sparsity, steps=settings.steps, seed=settings.seed)
    except AttachError as error:
        raise AttachError(f"--sparsity {settings.sparsity} does not work with this model: {error}") from error


def shard_of(
    settings: TrainingSettings, task: Task, tensors: Tensors, rank: int, size: int
) -> Shard | SkewedShard:
    """The shard that this rank draws its batches from."""
    labels = tensors["train_y"]
    if settings.skew is None:
        return Shard(len(labels), settings.batch, rank, size, settings.seed)
    return SkewedShard.of(task.kinds(labels), settings.batch, rank, size, settings.skew, settings.seed)


@contextmanager
def explained(optimizer: torch.optim.Optimizer, step: int, what: str = "gradients") -> Iterator[None]:
    """Around the optimiser's step: if gradients, or `what`, are not finite, raises an error with --lr."""
    try:
        yield
    except NonFiniteError as error:
        rate = max(float(group["lr"]) for group in optimizer.param_groups)
        raise NonFiniteError(
            f"training has diverged: the {what} of step {step} are not finite, at a learning rate of"
            f" {rate:g}; give a lower --lr"
        ) from error


def spent(before: Stats, now: Stats, with_noise: bool = True) -> dict[str, Any]:
    """Bytes, and seconds in each phase of the exchange, between two readings; and the gradient's noise."""
    between = {name: getattr(now, name) - getattr(before, name) for name in COUNTED + TIMED}
    phases = {name: total - before.phases.get(name, 0) for name, total in now.phases.items()}
    measured = now.noise if with_noise and now.noise != before.noise else None
    noise = {} if measured is None else {"noise": [measured.variance, measured.signal, measured.share]}
    return between | {"phases": phases} | noise


def share_buffers(model: nn.Module) -> None:
    """Copy rank 0's buffers to every rank."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)


def evaluate(model: nn.Module, task: Task, tensors: Tensors, rank: int, size: int) -> Event:
    """Test on this rank's share of the test set: right answers, sum of losses, number of answers.

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


def captured(
    settings: TrainingSettings,
    step: int,
    model: nn.Module,
    optimizer: DistributedOptimizer,
    sparse: SparseTraining | None = None,
) -> dict[str, Any]:
    """All that this rank needs to resume after `step` steps. Collective."""
    memory = optimizer.state_dict()  # first: it receives pending messages into the model
    masks = {} if sparse is None else {"sparsity": sparse.state_dict()}
    state = {"settings": settings.signature, "step": step, "model": model.state_dict(), "optimizer": memory}
    return state | masks


def restore(
    settings: TrainingSettings,
    state: dict[str, Any],
    model: nn.Module,
    optimizer: DistributedOptimizer,
    sparse: SparseTraining | None = None,
) -> int:
    """Restore a captured state; returns the number of steps done. Raises `StateError` if settings differ."""
    done = check_same(settings, state)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if sparse is not None:
        sparse.load_state_dict(state["sparsity"])
    return done


def check_same(settings: TrainingSettings, state: dict[str, Any]) -> int:
    """The number of steps that a state has done. Raises `StateError` if it is of other settings."""
    for name, value in settings.signature.items():
        if state["settings"].get(name) != value:
            raise StateError(
                f"{settings.resume_from} was trained with {name}={state['settings'].get(name)!r}, not"
                f" {value!r}; give the same settings, or another --name"
            )
    done: int = state["step"]
    return done


def save_packed(folder: Path, model: nn.Module, lowbit: Trained) -> str:
    """Write the packed model's state, and say how large its tensors are."""
    folder.mkdir(parents=True, exist_ok=True)
    state, dense = lowbit.pack().state_dict(), model.state_dict()
    torch.save(state, folder / PACKED)
    small, large = (sum(each.numel() * each.element_size() for each in d.values()) for d in (state, dense))
    return f"packed: {small:,} bytes, {large / small:.1f} times smaller, in {folder / PACKED}"


def save_model(folder: Path, model: nn.Module) -> None:
    """Write the group's model atomically."""
    temporary = folder / f".{MODEL}"
    torch.save({name: part.clone() for name, part in model.state_dict().items()}, temporary)
    temporary.replace(folder / MODEL)
