"""Sharded data parallel: `fully_shard` with a compressed reduce-scatter, or all-reduce of replicas.

A rank needs only its shard of the mean: the first half of `scatter_reduce`. FSDP2 passes flat chunks without
names, so a method's choice of tensors does not apply. With replicas of shards (HSDP), the method runs only
between them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from laconic.comm.metered import Meter, Metered
from laconic.comm.torch_comm import TorchComm
from laconic.core.codec import Codec
from laconic.core.errors import AttachError, StateError
from laconic.core.inference import outside_inference_mode
from laconic.core.layout import Layout
from laconic.exchange.agreement import built_by_all
from laconic.exchange.gathers import warn_of_gathers
from laconic.exchange.method import Method, lift
from laconic.exchange.save_watch import SaveWatch, saved_by_rank_0
from laconic.exchange.state import check_has, model_digest
from laconic.exchange.stats import Stats
from laconic.feedback.error_feedback import ErrorFeedback
from laconic.feedback.memory.contraction import safe_gain
from laconic.feedback.no_feedback import NoFeedback
from laconic.fsdp.gather import CodedAllGather, codec_of, default_gather, restore
from laconic.fsdp.memory import ShardMemory
from laconic.fsdp.models import groups_of, refuse_complex, sharded_modules
from laconic.fsdp.reduce_scatter import Scatter, Shards
from laconic.fsdp.replicas import Replicas
from laconic.optim.unwrapping import after_steps, stepping
from laconic.reducers.scatter_reduce import ScatterReduce
from laconic.reducers.sum import Sum

_compressed: WeakKeyDictionary[nn.Module, weakref.ref[ShardedHandle]] = WeakKeyDictionary()


def compress_sharded(
    model: nn.Module,
    optimizer: Optimizer,
    spec: Any,
    *,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
    parameters: Any = None,
) -> ShardedHandle:
    sharing, holding = groups_of(model)
    groups: list[TorchComm] = []

    def build() -> ShardedHandle:
        if scaler is not None:
            raise AttachError(
                "scaler= is not supported for sharded models, whose residuals would contain the scale: train"
                " in bfloat16 without a GradScaler"
            )
        ends = (Shards(within, seed), Shards(comm, seed))
        made = ShardedHandle(model, optimizer, spec, *ends, holding is not None, codec_of(parameters))
        if isinstance(made._gradients, Replicas) and comm.rank == 0:
            warn_of_gathers(made.method, made._gradients.exchange.layout, comm.size)
        return made

    def built() -> ShardedHandle:
        return built_by_all(within, build)

    try:
        for like in (sharing, sharing if holding is None else holding):
            groups.append(TorchComm.own(like))
        within, comm = (Metered(each) for each in groups)  # separate threads need separate meters
        handle = built() if holding is None else built_by_all(comm, built)
    except BaseException:
        close(groups)
        raise
    within.reset()
    comm.reset()
    handle.attach(groups)
    return handle


@outside_inference_mode("stats", "state_dict", "load_state_dict", "discard", "remove")
class ShardedHandle:
    """A compressed model under `fully_shard` on one rank: statistics, state, removal."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        spec: Any,
        within: Shards,
        gradients: Shards,
        replicated: bool,
        parameters: Codec | None = None,
    ) -> None:
        known = _compressed.get(model)
        taken = known and known()
        if taken:
            raise AttachError(
                f"this model is compressed already, with {taken.method}: call its handle's remove() first"
            )
        self.method: Method = lift(spec)
        self._within, self._shards = within, gradients
        self._model, self._optimizer = weakref.ref(model), stepping(optimizer)
        self._check_optimizer(model)
        refuse_complex(model)
        self._layout = Layout.of((name, tuple(part.shape)) for name, part in model.named_parameters())
        self._gradients: Scatter | Replicas
        if not replicated:
            reducer, feedback = sharded(self.method)
            memory = None if feedback is None else ShardMemory(feedback.decay)
            self._gradients = Scatter(reducer, model, gradients, memory)
            if memory is not None:
                safe_gain(reducer.codec, Layout.of([("all parameters", (self._layout.numel,))]))
        else:
            self._gradients = Replicas(self.method, model, gradients, within)
        self._made = self._gradients.made
        self._saves = SaveWatch(gradients.comm.counter(), gradients.comm.size, "Save one file per rank")
        self._parameters = parameters
        self._gathers: dict[str, Any] = {}
        if parameters is not None:
            self._gathers = {name: default_gather(name, module) for name, module in sharded_modules(model)}
        self._detach: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return (
            f"<{self.method} on {self._layout.numel:,} elements in shards, rank {self._shards.comm.rank} of"
            f" {self._shards.comm.size}>"
        )

    @property
    def saved_by_each(self) -> bool:
        return self._gradients.keeps

    @property
    def fingerprint(self) -> dict[str, str]:
        return {
            "the spec": repr(self.method),
            "the seed": str(self._shards.seed),
            "parameters=": repr(self._parameters),
            "the model": model_digest(self._layout),
        }

    def attach(self, groups: Sequence[TorchComm]) -> None:
        model = self._model()
        assert model is not None
        self._detach.append(partial(close, groups))
        try:
            self._gradients.attach(model)
            if self._parameters is not None:
                for name, module in sharded_modules(model):
                    gather = CodedAllGather(self._parameters, self._within, name, self._gathers[name])
                    module.set_custom_all_gather(gather)  # type: ignore[arg-type]
            self.when_removed(after_steps(self._optimizer, self._stepped).remove)
        except BaseException:
            self.remove()
            raise
        _compressed[model] = weakref.ref(self)
        weakref.finalize(model, close, groups).atexit = False

    def stats(self) -> Stats:
        """Return bytes and seconds of the compressed collectives; `dense`: bytes without compression."""
        parts = (self._within, self._shards)
        meter = Meter.of(dict(item for part in parts for item in part.comm.snapshot().parts.items()))
        seconds = self._within.seconds.plus(self._shards.seconds)
        dense = self._within.dense_bytes + self._gradients.dense_bytes
        return Stats.of(meter, seconds, steps=self._shards.step, dense=dense)

    def state_dict(self, *, gather: bool = False) -> dict[str, Any]:
        """Return the step, which seeds rounding, and this rank's memory, if any.

        Each rank saves its own: `gather` and Accelerate's `register_for_checkpointing` raise `StateError`.
        """
        if self.saved_by_each:
            if gather or saved_by_rank_0():
                raise StateError(
                    f"the memory of {self.method} is as large as the model's shard on each rank and is not"
                    " gathered: save it on each rank, or call laconic.integrations.keep_with(accelerator,"
                    " handle)"
                )
            self._saves.saved(self._shards.step)
        return self._state()

    def _state(self) -> dict[str, Any]:
        parameters = None if self._parameters is None else repr(self._parameters)
        own = {"spec": repr(self.method), "seed": self._shards.seed, "parameters": parameters}
        own |= {"model": model_digest(self._layout)}
        if self.saved_by_each:
            own |= {"rank": dist.get_rank(), "size": dist.get_world_size()}
            own |= {"memory": self._gradients.state_dict()}
        return own | {"step": self._shards.step, **self._gradients.counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`.

        Raises `StateError`, with nothing changed, if the model, method, seed, parameters= or, with memory,
        the rank or size differs, or the memory is missing.
        """
        own = self._state()
        own = {key: value for key, value in own.items() if key not in self._gradients.counts}
        check_has(state, own)
        for key in own.keys() - {"step", "memory"}:
            if state[key] != own[key]:
                raise StateError(f"the saved state is of {key} {state[key]!r}, this handle has {own[key]!r}")
        device = next(iter(self._optimizer.param_groups[0]["params"])).device
        memory = {key: tensor.to(device) for key, tensor in state.get("memory", {}).items()}
        self._gradients.load_state_dict(memory, state)
        self._within.step = self._shards.step = int(state["step"])
        self._made = self._gradients.made

    def discard(self) -> None:
        """Clear the residuals. Call on every rank, between steps."""
        self._gradients.discard()

    def remove(self) -> None:
        """Restore FSDP's collectives. Call on every rank, between steps."""
        detach, self._detach = self._detach, []
        model = self._model()
        if detach and model is not None:
            self._gradients.detach(model)
            for name, module in sharded_modules(model) if self._gathers else ():
                restore(module, self._gathers[name])
            _compressed.pop(model, None)
        for callback in detach:
            callback()

    def when_removed(self, *callbacks: Callable[[], object]) -> None:
        self._detach = [*callbacks, *self._detach]

    def _stepped(self, *_: Any) -> None:
        made, self._made = self._made, self._gradients.made
        if made == self._made:  # torch's state-dict functions also step
            return
        self._saves.check(self._shards.step)
        self._within.step = self._shards.step = self._shards.step + 1

    def _check_optimizer(self, model: nn.Module) -> None:
        own = {id(parameter) for parameter in model.parameters()}
        stepped = (id(parameter) for group in self._optimizer.param_groups for parameter in group["params"])
        if own.isdisjoint(stepped):
            raise AttachError(
                "this optimiser has none of the model's parameters: fully_shard replaces them, so build"
                " the optimiser after it"
            )


def close(groups: Sequence[TorchComm]) -> None:
    for group in groups:
        group.close()


def sharded(method: Method) -> tuple[ScatterReduce, ErrorFeedback | None]:
    routes = [route for route in method.routes if not isinstance(route.reducer, Sum)]
    reducers, feedbacks = ({getattr(route, key) for route in routes} for key in ("reducer", "feedback"))
    reducer, feedback = next(iter(reducers), None), next(iter(feedbacks), None)
    why = ""
    if any(route.rule is not None for route in method.routes):
        why = "it changes how the optimiser steps"
    elif reducer is None:
        why = "fully_shard already sums: for 16 bits use MixedPrecisionPolicy(reduce_dtype=...)"
    elif len(reducers) > 1 or not isinstance(reducer, ScatterReduce):
        why = f"{reducer!r} has no first half that leaves each rank its shard"
    elif len(feedbacks) > 1 or not isinstance(feedback, (NoFeedback, ErrorFeedback)):
        why = f"shards support only error feedback, and this has {feedback!r}"
    elif isinstance(feedback, ErrorFeedback) and (feedback.damped or reducer.feedback == "both"):
        why = "shards support only plain error feedback, without damped=True and feedback='both'"
    if why:
        raise AttachError(f"{method} cannot be sharded: {why}; use cgx(bits=4), or a larger bits=")
    assert isinstance(reducer, ScatterReduce)
    return reducer, feedback if isinstance(feedback, ErrorFeedback) else None
