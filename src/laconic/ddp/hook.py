"""DDP's communication hook: puts an exchange behind DistributedDataParallel.

    loss.backward() -> hook(bucket): a job for the thread, and a Future at once; backward goes on
                    -> the communication thread: Attached.mean_(bucket), over a process group of its own
                    -> optimizer.step()

DDP takes a hook once for life, so the hook asks a `Slot` that stays; an empty one is DDP's own all-reduce.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # torch.distributed.GradBucket, where types see it
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.comm.communication_thread import Answer, CommunicationThread
from laconic.comm.joint_calls import JointCalls
from laconic.comm.metered import Metered
from laconic.comm.torch_comm import TorchComm
from laconic.core.errors import AttachError, LaconicError
from laconic.core.layout import Layout
from laconic.ddp.handle import Handle
from laconic.ddp.step_checks import StepChecks
from laconic.ddp.uneven import JoinedModel
from laconic.exchange.agreement import built_by_all
from laconic.exchange.gathers import warn_of_gathers
from laconic.exchange.method import lift
from laconic.optim.unwrapping import stepping, unwrap_all


class Slot:
    """What the hook of one DDP asks at every bucket.

    A copy is empty, and of the default group, as DDP's own copies are: a copied model is a plain DDP.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.handle: Handle | None = None
        self._thread: CommunicationThread | None = None

    def __reduce__(self) -> "tuple[type[Slot], tuple[()]]":
        return Slot, ()

    def empty(self) -> None:
        """Back to a plain all-reduce."""
        self.handle = None

    def mean(self, buffer: Tensor) -> Answer:
        """DDP's own mean, later. A thread of ours waits for it: a callback of the work's future would run in
        a thread of gloo's, which may ask for the GIL when Python has ended.
        """
        buffer.div_(dist.get_world_size(self.group))
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        assert work is not None

        def job() -> Tensor:
            work.wait()
            return buffer

        if self._thread is None:
            self._thread = CommunicationThread(f"plain all-reduce of rank {dist.get_rank(self.group)}")
        return self._thread.submit(job, buffer.device)


_slots: WeakKeyDictionary[DistributedDataParallel, Slot] = WeakKeyDictionary()
# weak references, as a slot holds its optimiser
_compressed: WeakKeyDictionary[Optimizer, weakref.ref[Slot]] = WeakKeyDictionary()


def attach(
    model: DistributedDataParallel,
    optimizer: Optimizer | Sequence[Optimizer],
    spec: Any,
    *,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
) -> Handle:
    """`laconic.compress` for a DistributedDataParallel; called by all ranks of its group."""
    optimizers, scaler = unwrap_all(optimizer, scaler)
    with contextlib.ExitStack() as opened:  # closed in reverse order if anything raises
        group = TorchComm.own(model.process_group)
        opened.callback(group.close)
        comm = Metered(group)
        joint_calls = JointCalls(group)
        opened.callback(joint_calls.close)

        def build() -> Handle:
            check_free(model, optimizers)
            method, names, sparse = lift(spec), parameter_names(model), sparse_names(model)
            if comm.rank == 0:
                dense = ((name, parameter.shape) for parameter, name in names.items() if name not in sparse)
                warn_of_gathers(method, Layout.of(dense), comm.size)
            return Handle(
                method,
                names,
                optimizers,
                comm,
                scaler=scaler,
                seed=seed,
                sparse=sparse,
                restore_unused=bool(model.find_unused_parameters),
                joined=JoinedModel(model),
                joint_calls=joint_calls,
            )

        handle = built_by_all(comm, build, Handle.abandon)
        opened.callback(handle.buckets.close)
        opened.callback(handle.let_go)
        slot = _slots.get(model) or new_slot(model)
        comm.reset()
        checks = StepChecks(model, parameter_names(model), optimizers, repr(handle.method))
        opened.callback(checks.remove)
        for each in optimizers:
            _compressed[stepping(each)] = weakref.ref(slot)
        slot.handle = handle
        opened.pop_all()  # from here on the handle closes them

    def close() -> None:
        joint_calls.close()
        group.close()

    handle.when_removed(checks.remove, slot.empty, close)
    weakref.finalize(model, let_go, slot, handle, close, checks).atexit = False
    return handle


def let_go(slot: Slot, handle: Handle, close: Callable[[], None], checks: StepChecks) -> None:
    """The model is gone: its optimiser steps as before, and may be compressed with another model."""
    if slot.handle is handle:
        slot.empty()
        handle.let_go()
        checks.remove()
    handle.buckets.end(close)


def check_free(model: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
    """Raise `AttachError` if the model or an optimiser is compressed already, or cannot be."""
    if getattr(model, "_use_python_reducer", False):  # private to DDP, and all that tells
        raise AttachError(
            "torch._dynamo.config.optimize_ddp is 'python_reducer': then compiled backward passes trace the"
            " exchange of each gradient, and a thread's messages cannot be traced; set it to 'ddp_optimizer'"
            " before you build the DistributedDataParallel"
        )
    known = [_compressed.get(stepping(each)) for each in optimizers]
    slots = [("model", _slots.get(model)), *(("optimiser", each()) for each in known if each is not None)]
    for taken, slot in slots:
        if slot is not None and slot.handle is not None:
            raise AttachError(
                f"this {taken} is compressed already, with {slot.handle.method}: call its handle's remove()"
                " first"
            )


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
        if bucket.buffer().is_cuda and torch.cuda.is_current_stream_capturing():
            raise LaconicError(
                f"a CUDA graph cannot capture backward() of a model compressed with {slot.handle.method}: a"
                " thread exchanges its gradients, and a graph records no other thread. Call backward()"
                " outside of torch.cuda.graph(...), or the handle's remove() first"
            )
        return slot.handle.buckets.submit(bucket)
    return slot.mean(bucket.buffer())


def parameter_names(model: DistributedDataParallel) -> dict[Tensor, str]:
    """Each parameter that DDP exchanges, with its name in the plain model.

    It is what was trained when the DDP was built. What has been frozen since stays in its buckets.
    """
    module, ignored = model.module, set(getattr(model, "parameters_to_ignore", ()))
    every = {each: name for name, each in module.named_parameters() if name not in ignored}
    held = {each for each in every if each.requires_grad}
    if len(held) < len(every) or len(held) != _count(model):
        with contextlib.suppress(RuntimeError):  # before its first pass an embedding has no sparse gradient
            buckets = model.reducer._get_zeros_like_grad_buckets()
            held = {each for bucket in buckets for each in bucket.parameters()}
    return {each: name.replace("_orig_mod.", "") for each, name in every.items() if each in held}


def _count(model: DistributedDataParallel) -> int:
    """The number of tensors that DDP exchanges."""
    found: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return int(found.get("num_parameter_tensors", 0))


def trained(module: torch.nn.Module) -> dict[Tensor, str]:
    """Each trained parameter of a plain model with its name: a compiled wrapper leaves no trace."""
    return {
        parameter: name.replace("_orig_mod.", "")
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def sparse_names(model: DistributedDataParallel) -> set[str]:
    """Names of the embeddings whose gradients are sparse tensors: no feedback carries these."""
    found = {each.weight for each in sparse_embeddings(model.module)}
    return {name for parameter, name in parameter_names(model).items() if parameter in found}


def sparse_embeddings(module: torch.nn.Module) -> list[torch.nn.Embedding | torch.nn.EmbeddingBag]:
    """The embeddings whose gradients are sparse tensors."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return [each for each in module.modules() if isinstance(each, kinds) and each.sparse]
