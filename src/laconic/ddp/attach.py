"""Attaching a method to a DistributedDataParallel."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.comm.joint_calls import JointCalls
from laconic.comm.metered import Metered
from laconic.comm.torch_comm import TorchComm
from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.ddp.buckets import Slot, hook
from laconic.ddp.handle import Handle
from laconic.ddp.step_checks import StepChecks
from laconic.ddp.uneven import JoinedModel
from laconic.exchange.agreement import built_by_all
from laconic.exchange.gathers import warn_of_gathers
from laconic.exchange.method import lift
from laconic.exchange.steps_needed import log_steps_needed
from laconic.optim.unwrapping import stepping, unwrap_all

_slots: WeakKeyDictionary[DistributedDataParallel, Slot] = WeakKeyDictionary()
# values are weak: a slot holds its optimiser
_compressed: WeakKeyDictionary[Optimizer, weakref.ref[Slot]] = WeakKeyDictionary()


def attach(
    model: DistributedDataParallel,
    optimizer: Optimizer | Sequence[Optimizer],
    spec: Any,
    *,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
) -> Handle:
    optimizers, scaler = unwrap_all(optimizer, scaler)
    with contextlib.ExitStack() as opened:  # closed in reverse order on errors
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
                log_steps_needed(method)
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
        slot.buckets = handle.buckets
        opened.pop_all()  # the handle closes them

    def close() -> None:
        joint_calls.close()
        group.close()

    handle.when_removed(checks.remove, slot.empty, close)
    weakref.finalize(model, detach, slot, handle, close, checks).atexit = False
    return handle


def detach(slot: Slot, handle: Handle, close: Callable[[], None], checks: StepChecks) -> None:
    if slot.buckets is handle.buckets:
        slot.empty()
        handle.detach()
        checks.remove()
    handle.buckets.end(close)


def check_free(model: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
    if getattr(model, "_use_python_reducer", False):
        raise AttachError(
            "torch._dynamo.config.optimize_ddp is 'python_reducer', so compiled backward passes trace the"
            " exchange of each gradient, but a thread's messages cannot be traced: set it to 'ddp_optimizer'"
            " before you build the DistributedDataParallel"
        )
    known = [_compressed.get(stepping(each)) for each in optimizers]
    slots = [("model", _slots.get(model)), *(("optimiser", each()) for each in known if each is not None)]
    for taken, slot in slots:
        if slot is not None and slot.buckets is not None:
            raise AttachError(
                f"this {taken} is compressed already, with {slot.buckets.exchange.method}: call its handle's"
                " remove() first"
            )


def new_slot(model: DistributedDataParallel) -> Slot:
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


def parameter_names(model: DistributedDataParallel) -> dict[Tensor, str]:
    """Return exchanged parameters with names; those frozen after DDP was built stay in its buckets."""
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
    return {
        parameter: name.replace("_orig_mod.", "")
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def sparse_names(model: DistributedDataParallel) -> set[str]:
    found = {each.weight for each in sparse_embeddings(model.module)}
    return {name for parameter, name in parameter_names(model).items() if parameter in found}


def sparse_embeddings(module: torch.nn.Module) -> list[torch.nn.Embedding | torch.nn.EmbeddingBag]:
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return [each for each in module.modules() if isinstance(each, kinds) and each.sparse]
