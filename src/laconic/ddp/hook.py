"""Communication hook of DistributedDataParallel.

    loss.backward() -> hook(bucket): queues a job and returns a Future; backward continues
                    -> the communication thread: Attached.mean_(bucket), over a separate process group
                    -> optimizer.step()

DDP accepts one hook for its lifetime, so the hook calls a permanent `Slot`; an empty one is DDP's own
all-reduce.
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
    """Current handle of one DDP, which the permanent hook calls for every bucket.

    A copy is empty and uses the default group, as DDP's own copies do.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.handle: Handle | None = None
        self._thread: CommunicationThread | None = None

    def __reduce__(self) -> "tuple[type[Slot], tuple[()]]":
        return Slot, ()

    def empty(self) -> None:
        self.handle = None

    def mean(self, buffer: Tensor) -> Answer:
        """Return a Future of DDP's own mean.

        A thread of ours waits for it: a callback of the work's future would run in a thread of gloo's, which
        may ask for the GIL after Python has ended.
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
# weak references, since a slot holds its optimiser
_compressed: WeakKeyDictionary[Optimizer, weakref.ref[Slot]] = WeakKeyDictionary()


def attach(
    model: DistributedDataParallel,
    optimizer: Optimizer | Sequence[Optimizer],
    spec: Any,
    *,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
) -> Handle:
    """Compress a DistributedDataParallel, as `laconic.compress`."""
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
        opened.callback(handle.detach)
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
    weakref.finalize(model, detach, slot, handle, close, checks).atexit = False
    return handle


def detach(slot: Slot, handle: Handle, close: Callable[[], None], checks: StepChecks) -> None:
    """Detach from the optimiser of a freed model, so that it can be compressed with a new model."""
    if slot.handle is handle:
        slot.empty()
        handle.detach()
        checks.remove()
    handle.buckets.end(close)


def check_free(model: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
    if getattr(model, "_use_python_reducer", False):  # private to DDP
        raise AttachError(
            "torch._dynamo.config.optimize_ddp is 'python_reducer', so compiled backward passes trace the"
            " exchange of each gradient, but a thread's messages cannot be traced: set it to 'ddp_optimizer'"
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
    """Register the hook for the model's lifetime. Raises `AttachError` if the model has a different one."""
    slot = Slot(model.process_group)
    try:
        model.register_comm_hook(slot, hook)
    except RuntimeError as error:
        raise AttachError(
            f"this DistributedDataParallel has a communication hook already ({error}); DDP accepts only"
            " one, and mixed_precision= counts as one: build a new DistributedDataParallel without it"
        ) from None
    _slots[model] = slot
    return slot


def hook(slot: Slot, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Return a Future of the bucket's mean over ranks. It is DDP's communication hook."""
    if slot.handle is not None:
        if bucket.buffer().is_cuda and torch.cuda.is_current_stream_capturing():
            raise LaconicError(
                f"a CUDA graph cannot capture backward() of a model compressed with {slot.handle.method}: a"
                " thread exchanges its gradients, and a graph records only the calling thread. Call"
                " backward() outside of torch.cuda.graph(...), or the handle's remove() first"
            )
        return slot.handle.buckets.submit(bucket)
    return slot.mean(bucket.buffer())


def parameter_names(model: DistributedDataParallel) -> dict[Tensor, str]:
    """Return each parameter that DDP exchanges, with its name in the plain model.

    These were trained when the DDP was built; parameters frozen since stay in its buckets.
    """
    module, ignored = model.module, set(getattr(model, "parameters_to_ignore", ()))
    every = {each: name for name, each in module.named_parameters() if name not in ignored}
    held = {each for each in every if each.requires_grad}
    if len(held) < len(every) or len(held) != _count(model):
        with contextlib.suppress(RuntimeError):  # raised before the first backward pass of a sparse embedding
            buckets = model.reducer._get_zeros_like_grad_buckets()
            held = {each for bucket in buckets for each in bucket.parameters()}
    return {each: name.replace("_orig_mod.", "") for each, name in every.items() if each in held}


def _count(model: DistributedDataParallel) -> int:
    found: dict[str, Any] = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return int(found.get("num_parameter_tensors", 0))


def trained(module: torch.nn.Module) -> dict[Tensor, str]:
    """Return each trained parameter with its name, without the prefix of compiled wrappers."""
    return {
        parameter: name.replace("_orig_mod.", "")
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def sparse_names(model: DistributedDataParallel) -> set[str]:
    """Return the names of embeddings with sparse gradients, which have no feedback."""
    found = {each.weight for each in sparse_embeddings(model.module)}
    return {name for parameter, name in parameter_names(model).items() if parameter in found}


def sparse_embeddings(module: torch.nn.Module) -> list[torch.nn.Embedding | torch.nn.EmbeddingBag]:
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return [each for each in module.modules() if isinstance(each, kinds) and each.sparse]
