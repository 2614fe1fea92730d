"""HSDP: exact shards within a machine, and a method between machines.

    backward -> fully_shard's own reduce-scatter, within a machine: a rank's shard of its machine's mean
             -> Attached.mean_, between the ranks that hold this shard, in place of the all-reduce
             -> the sharded gradient

A module's shard is a bucket, and each parameter's padded shard a tensor. fully_shard skips the hook after its
all-reduce for a model without replicas, so these are removed from its description of the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from laconic.core.errors import AttachError, StateError
from laconic.core.layout import Layout
from laconic.exchange.attached import Attached
from laconic.exchange.method import Method
from laconic.exchange.no_optimiser import NoOptimiser, refuse_optimised
from laconic.fsdp.backward import OverlappedExchanges, may_wait
from laconic.fsdp.backward_pass import BackwardPass
from laconic.fsdp.models import param_group_of, sharded_modules, trained_of
from laconic.fsdp.reduce_scatter import Shards
from laconic.fsdp.verdict import Verdict
from laconic.fsdp.waiting import WaitingGradients


class Replicas:
    _verdict: Verdict | None = None

    def __init__(self, method: Method, model: nn.Module, shards: Shards, within: Shards) -> None:
        refuse_optimised(method, "between replicas of shards")
        self._layouts = {name: layout_of(model, module) for name, module in sharded_modules(model)}
        self._trained = {name: trained_of(param_group_of(module)) for name, module in sharded_modules(model)}
        self._before = {name: own_mesh(name, module) for name, module in sharded_modules(model)}
        pairs = [(entry.name, entry.shape) for layout in self._layouts.values() for entry in layout]
        self.exchange = Attached(
            method, Layout.of(pairs), shards.comm, NoOptimiser(), shards.seed, shards.seconds
        )
        self._verdict = Verdict(within.comm.comm)
        self._pass = BackwardPass()
        self._waiting = WaitingGradients()
        self._keeps = False
        self._detach: list[Callable[[], None]] = []
        self._beside: OverlappedExchanges | None = None

    def attach(self, model: nn.Module) -> None:
        self._beside = OverlappedExchanges(f"replicas of rank {self.exchange.comm.rank}")
        self._detach.append(self._pass.watch(model).remove)
        for name, module in sharded_modules(model):
            describe(param_group_of(module), without_replicas(self._before[name]))
            module.set_all_reduce_hook(ReplicaMean(self, name, self._before[name], module))

    def detach(self, model: nn.Module) -> None:
        for name, module in sharded_modules(model):
            describe(param_group_of(module), self._before[name])
            param_group_of(module)._all_reduce_hook = None
        for detach in self._detach:
            detach()
        self._detach.clear()
        if self._beside is not None:
            self._beside.close()

    @property
    def dense_bytes(self) -> int:
        return self.exchange.dense_bytes

    @property
    def made(self) -> int:
        return self.exchange.step

    @property
    def keeps(self) -> bool:
        if not self._keeps and self.exchange.remembers:
            self._keeps = bool(self.exchange.state_dict())
        return self._keeps

    @property
    def counts(self) -> dict[str, int]:
        return {"exchanges": self.exchange.step}

    def state_dict(self) -> dict[str, Tensor]:
        return self.exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], counts: Mapping[str, int]) -> None:
        if "exchanges" not in counts:
            raise StateError("the saved state has no number of exchanges: it is not of replicas of shards")
        self.exchange.load_state_dict(state, step=int(counts["exchanges"]))

    def discard(self) -> None:
        self.exchange.discard()

    def check(self, reduced: Tensor, module: str, group: Any) -> None:
        layout = self._layouts[module]
        if trained_of(group) != self._trained[module]:
            raise AttachError(
                f"other parameters of {module or 'the model'} are trained than when it was compressed, and"
                " replicas exchange those: handle.remove() before you freeze or thaw, and compress again"
            )
        if reduced.numel() != layout.numel:
            raise AttachError(
                f"{module or 'the model'} has gradients for {reduced.numel():,} of its {layout.numel:,}"
                " sharded elements in this step, and replicas exchange all of them: before compress, freeze"
                " parameters that are not used"
            )

    def mean_(self, reduced: Tensor, name: str, module: FSDPModule) -> None:
        group = param_group_of(module)
        if self._pass.enter(self._end):
            self._waiting.begin()
            if self._verdict is not None:
                self._verdict.begin()
        if self._verdict is not None:
            self._verdict.add(group)
        if torch._C._current_graph_task_id() >= 0 and self._waiting.waits(name, module):
            self._waiting.add(reduced, name, group)
        else:
            self._exchange_(reduced.to(torch.float32), reduced, name, group)

    def _exchange_(self, flat: Tensor, mean: Tensor, name: str, group: Any) -> None:
        """Write the mean of `flat` (n,) to `mean`, which may be `flat` itself."""
        layout, first = self._layouts[name], self._waiting.none_exchanged
        self._waiting.exchanged(name)
        wait = flat.is_cpu and flat is mean and may_wait(mean, group)

        def job() -> None:
            if first:
                self.exchange.begin()
            finite = self.exchange.mean_(flat, layout, wait=wait)
            if flat is not mean:
                mean.copy_(flat)
                if finite and not bool(mean.isfinite().all()):
                    self.exchange.cancel(f"the mean of {name or 'the model'} does not fit {mean.dtype}")

        assert self._beside is not None
        self._beside.fill(mean, job, group)

    def _end(self) -> None:
        assert self._beside is not None
        exchange, verdict = self.exchange, self._verdict
        waiting = self._waiting.take()
        for each in waiting:
            self._exchange_(each.flat, each.mean, each.module, each.group)

        def end() -> None:
            if (
                verdict is not None
                and verdict.is_skipped(exchange.skip_reason is not None)
                and exchange.skip_reason is None
            ):
                exchange.cancel("a tensor in another shard")
            exchange.end()

        self._beside.finish(end)
        for each in waiting:
            each.add_mean(self._layouts[each.module])
        if verdict is not None:
            if exchange.skip_reason is not None:
                verdict.set_nan()
            verdict.begin()  # free the references to modules


class ReplicaMean:
    """All-reduce hook of a module. It replaces `before`.

    After `set_requires_all_reduce(False)` shards accumulate until machines exchange them.
    """

    def __init__(self, replicas: Replicas, name: str, before: Any, module: FSDPModule) -> None:
        self.before = before
        self._replicas, self._name, self._module = replicas, name, module
        self._waiting: Tensor | None = None

    def __call__(self, reduced: Tensor) -> None:
        group = param_group_of(self._module)
        self._replicas.check(reduced, self._name, group)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            reduced.add_(waiting)
        if group.all_reduce_grads:
            self._replicas.mean_(reduced, self._name, self._module)
        else:
            self._waiting = reduced.clone()
            reduced.zero_()


def layout_of(model: nn.Module, module: FSDPModule) -> Layout:
    names = {id(part): name for name, part in model.named_modules()}
    shapes = []
    for parameter in param_group_of(module).fsdp_params:
        if parameter.sharded_param.requires_grad:
            place = parameter._module_info
            prefix = names[id(place.module)]
            name = f"{prefix}.{place.param_name}" if prefix else place.param_name
            shapes.append((name, tuple(parameter.padded_sharded_param_size)))
    return Layout.of(shapes)


def own_mesh(name: str, module: FSDPModule) -> Any:
    group = param_group_of(module)
    if isinstance(group._all_reduce_hook, ReplicaMean):  # of a handle freed without remove()
        return group._all_reduce_hook.before
    where = name or "the model"
    if group._all_reduce_hook is not None:
        raise AttachError(
            f"{where} already has an all-reduce hook, and only one is possible: shard a new model without"
            " set_all_reduce_hook"
        )
    if group.gradient_divide_factor is not None:
        raise AttachError(
            f"{where} divides gradients by {group.gradient_divide_factor}, but replicas exchange means: omit"
            " set_gradient_divide_factor"
        )
    return group.mesh_info


def describe(group: Any, info: Any) -> None:
    """Set FSDP2's description of a module's mesh, also that after a forward pass if both are equal.

    If they differ, FSDP2 keeps a copy of each parameter for the latter.
    """
    if group.post_forward_mesh_info == group.mesh_info:
        group.post_forward_mesh_info = info
    group.mesh_info = info


def without_replicas(info: Any) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    plain = FSDPMeshInfo(mesh=info.mesh, shard_mesh_dim=info.shard_mesh_dim)
    plain.__dict__.update({key: value for key, value in vars(info).items() if "replicate" not in key})
    return plain
