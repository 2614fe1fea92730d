"""Data parallel: `compress` puts an exchange behind DistributedDataParallel's communication hook.

    loss.backward() -> hook(bucket): a job for the FIFO thread, and a Future at once; backward goes on
                    -> the thread: Exchange.mean_(bucket), over a process group of its own
                    -> optimizer.step()

DDP takes a hook once for life, so the hook asks a `Slot` that stays: empty, it is DDP's own all-reduce.
"""

import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # torch.distributed.GradBucket, where types see it
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.comm.metered import Metered
from laconic.comm.torch_comm import TorchComm
from laconic.core.errors import AttachError
from laconic.strategies.agreement import agree
from laconic.strategies.handle import Handle
from laconic.strategies.method import lift


class Slot:
    """What the hook of one DDP asks at every bucket."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.handle: Handle | None = None

    def empty(self) -> None:
        """Back to a plain all-reduce."""
        self.handle = None


_slots: WeakKeyDictionary[DistributedDataParallel, Slot] = WeakKeyDictionary()
_compressed: WeakKeyDictionary[Optimizer, weakref.ref[Slot]] = (
    WeakKeyDictionary()
)  # a slot holds its optimiser


def compress(
    model: DistributedDataParallel,
    optimizer: Optimizer,
    spec: Any,
    *,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
) -> Handle:
    """Exchange this model's gradients by the method that `spec` names; the rest of the script stays as it is.

    `model`: a DistributedDataParallel, before its first backward or later. `optimizer`: over its parameters.
    `spec`: a string such as "dgc(density=0.001)", or what `laconic.parse` returns; equal on all ranks.
    `scaler`: the GradScaler in use, so that memory is kept unscaled. `seed`: of sampling and stochastic
    rounding.

    Called by all ranks of the model's group. Raises `AttachError` on every rank, with nothing attached, for
    a model that is not DDP or has another hook, an optimiser that is compressed already or that the method
    cannot use, and where ranks disagree; `SpecError` for a wrong spec.
    """
    if not isinstance(model, DistributedDataParallel):
        raise AttachError(
            f"compress needs a DistributedDataParallel, got {type(model).__name__}:"
            " wrap it first, model = DistributedDataParallel(model), or shard it with fully_shard"
        )
    group = TorchComm.own(model.process_group)
    comm = Metered(group)
    try:
        handle, slot = _bind(model, optimizer, spec, comm, scaler, seed)
    except Exception as error:
        try:
            agree(comm, None, error)  # so that no rank waits for one that has given up; raises `error` itself
        finally:
            group.close()
        raise
    handle.when_removed(group.close)
    try:
        agree(comm, handle.fingerprint)
        slot = slot or new_slot(model)
    except BaseException:
        handle.remove()
        raise
    comm.reset()
    slot.handle = handle
    _compressed[optimizer] = weakref.ref(slot)
    handle.when_removed(slot.empty, group.close)
    weakref.finalize(model, handle.buckets.fifo.end).atexit = False
    return handle


def _bind(
    model: DistributedDataParallel,
    optimizer: Optimizer,
    spec: Any,
    comm: Metered,
    scaler: torch.amp.GradScaler | None,
    seed: int,
) -> tuple[Handle, Slot | None]:
    """This rank's handle, and the hook that the model has from us, if it has one. Changes nothing."""
    slot = free_slot(model, optimizer)
    handle = Handle(
        lift(spec),
        parameter_names(model),
        optimizer,
        comm,
        scaler=scaler,
        seed=seed,
        sparse=sparse_names(model),
        restore_unused=bool(model.find_unused_parameters),
        joining=joining(model),
    )
    return handle, slot


def joining(model: DistributedDataParallel) -> Callable[[], bool]:
    """Tells whether the model is inside `torch.distributed.algorithms.Join` now."""
    known = weakref.ref(model)

    def answer() -> bool:
        config = getattr(known(), "_join_config", None)  # private to DDP, and all that tells
        return bool(config and config.enable)

    return answer


def free_slot(model: DistributedDataParallel, optimizer: Optimizer) -> Slot | None:
    """The model's empty hook, or None. Raises `AttachError` where the model or the optimiser is taken."""
    slot, known = _slots.get(model), _compressed.get(optimizer)
    other = known and known()
    taken = (slot and slot.handle) or (other and other.handle)
    if taken:
        what = "model" if slot and slot.handle else "optimiser"
        raise AttachError(
            f"this {what} is compressed already, with {taken.method}: call its handle's remove() first"
        )
    return slot


def new_slot(model: DistributedDataParallel) -> Slot:
    """Our hook, put on the model for its life. Raises `AttachError` where it has another."""
    slot = Slot(model.process_group)
    try:
        model.register_comm_hook(slot, hook)
    except RuntimeError as error:
        raise AttachError(
            f"this DistributedDataParallel has a communication hook already ({error}); DDP takes one"
            " for life, and mixed_precision= counts as one: build a new DistributedDataParallel without it"
        ) from None
    _slots[model] = slot
    return slot


def hook(slot: Slot, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook: the bucket's mean over ranks, later."""
    if slot.handle is not None:
        return slot.handle.buckets.submit(bucket)
    buffer = bucket.buffer()
    buffer.div_(dist.get_world_size(slot.group))
    work = dist.all_reduce(buffer, group=slot.group, async_op=True)
    assert work is not None
    mean: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return mean


def parameter_names(model: DistributedDataParallel) -> dict[Tensor, str]:
    """Each trained parameter with its name in the plain model: a compiled wrapper leaves no trace."""
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    return {
        parameter: name.replace("_orig_mod.", "")
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


def sparse_names(model: DistributedDataParallel) -> set[str]:
    """Names of the embeddings whose gradients are sparse tensors: no feedback carries these."""
    found = {
        module.weight
        for module in model.module.modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
    }
    return {name for parameter, name in parameter_names(model).items() if parameter in found}
