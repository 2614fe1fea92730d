"""Replica: one rank's model as one flat tensor, with the parameters as views.

The parameters stay the same objects. A half-precision parameter cannot be a view: its part of the tensor
holds averages in float32 and collects its updates; with `master_weights` that part is the master.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.comm.comm import Comm
from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.ddp.compress import is_sharded
from laconic.optim.master_weights import masters_of
from laconic.optim.stochastic_rounding import HALF
from laconic.strategies.root_copy import copy_from_root
from laconic.strategies.several import each_of

MOVED = (
    "the memory of {} was replaced after distribute(), as by model.to(...): move the model first, then call"
    " distribute()"
)
AVERAGED = (torch.float32, torch.float64, *HALF)  # buffers that have a mean


class Replica:
    """Trained parameters of one model: `flat` float32 (n,), laid out by `layout`.

    `statistics`: floating-point buffers; `constants`: other buffers, and expanded tensors; `frozen`:
    untrained parameters. Trained parameters that only the optimiser holds are "outside.<i>". Raises
    `AttachError` for unsupported parameters.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        named = ((name.replace("_orig_mod.", ""), each) for name, each in model.named_parameters())
        self.parameters = {name: each for name, each in named if each.requires_grad}
        own = set(self.parameters.values())
        held = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        outside = [each for each in held if each not in own]
        self._untouched = bool(own) and len(outside) == len(held)  # no optimiser steps the model
        self.parameters |= {f"outside.{i}": each for i, each in enumerate(outside)}
        self._optimizers = each_of(optimizer)
        self._model = weakref.ref(model)
        self.layout = Layout.of((name, tuple(each.shape)) for name, each in self.parameters.items())
        self._check(model)
        self.flat = torch.empty(0, dtype=torch.float32, device="cpu")
        self._detached = False

    def _check(self, model: nn.Module) -> None:
        if is_sharded(model):
            raise AttachError(
                "fully_shard has sharded this model, and a strategy needs a whole one on every rank: omit"
                " fully_shard, or keep it and call laconic.compress(model, optimizer, 'cgx(bits=8)')"
            )
        if any(each.is_meta for each in (*self.parameters.values(), *self.frozen, *self._buffers())):
            raise AttachError(
                "this model is on the meta device and has no values yet: initialise it, as with"
                " model.to_empty(device='cpu') and its own initialisation, before you create the optimiser"
                " and call distribute()"
            )
        if not self.parameters:
            raise AttachError("this model has no parameter with requires_grad: there is nothing to train")
        first = next(iter(self.parameters.values()))
        for name, each in self.parameters.items():
            if each.dtype not in (torch.float32, *HALF):
                raise AttachError(
                    f"{name} is {each.dtype}, but parameters that ranks exchange must be float32, bfloat16 or"
                    " float16: convert the model with model.float() before you create the optimiser"
                )
            if each.device != first.device:
                raise AttachError(
                    f"{name} is on {each.device}, others on {first.device}: put all on one device"
                )
        if self._untouched:
            raise AttachError(
                "the optimiser holds no trained parameter of this model, which would never change: create it"
                " from model.parameters(), after anything that replaces them, such as a copy of the model"
            )

    @property
    def statistics(self) -> tuple[Tensor, ...]:
        """Current floating-point buffers: `forward` may replace them."""
        return tuple(each for each in self._buffers() if each.dtype in AVERAGED and not _is_expanded(each))

    @property
    def constants(self) -> tuple[Tensor, ...]:
        return tuple(each for each in self._buffers() if each.dtype not in AVERAGED or _is_expanded(each))

    @property
    def frozen(self) -> tuple[Tensor, ...]:
        model, exchanged = self._model(), set(self.parameters.values())
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        held = (
            *(() if model is None else model.parameters()),
            *(x for each in groups for x in each["params"]),
        )
        return tuple(dict.fromkeys(each for each in held if each not in exchanged))

    def _buffers(self) -> tuple[Tensor, ...]:
        model = self._model()
        return () if model is None else tuple(model.buffers())

    def flatten(self) -> None:
        device = next(iter(self.parameters.values())).device
        self.flat = torch.empty(self.layout.numel, device=device, dtype=torch.float32)
        for name, view in self.views(self.flat).items():
            view.copy_(self.parameters[name].detach())
            if self.parameters[name].dtype == torch.float32:
                self.parameters[name].data = view
        self.lay_out_state()

    def lay_out_state(self) -> None:
        for parameter in self.parameters.values():
            if parameter.dtype == torch.float32 and parameter.grad is not None:
                parameter.grad = _in_order(parameter.grad, parameter)
            if parameter.dtype == torch.float32 or self._master(parameter) is not None:
                for state in (each.state[parameter] for each in self._optimizers if parameter in each.state):
                    state.update({key: _in_order(value, parameter) for key, value in state.items()})

    def halves(self) -> list[tuple[nn.Parameter, Tensor]]:
        if all(each.dtype == torch.float32 for each in self.parameters.values()):
            return []
        pairs = ((self.parameters[name], view) for name, view in self.views(self.flat).items())
        return [(each, view) for each, view in pairs if each.dtype != torch.float32]

    def publish(self) -> None:
        for each, view in self.halves():
            each.data.copy_(view)

    @contextmanager
    def as_flat(self) -> Iterator[None]:
        """Round `flat` to the half-precision parameters on exit.

        On entry, outside changes to them are copied to `flat`, and parameters become views again.
        """
        self._attach()
        for each, view in self.halves():
            same = view.to(each.dtype) == each.detach()
            if not (same.is_cpu and bool(same.all())):  # on other devices the check costs more
                view.copy_(torch.where(same, view, each.detach().float()))
        try:
            yield
        finally:
            self.publish()

    def update(self, optimise: Callable[[], object]) -> None:
        self.publish()
        pairs = [(each, view) for each, view in self.halves() if not self._lent(each, view)]
        before = [each.detach().float() for each, _ in pairs]
        optimise()
        for old, (each, view) in zip(before, pairs, strict=True):
            view.add_(each.detach().float().sub_(old))

    def _lent(self, parameter: Tensor, view: Tensor) -> bool:
        """Return whether the optimiser steps this part of `flat` itself, as master weights."""
        master = self._master(parameter)
        if master is not None:
            master.data = view
        return master is not None

    def _master(self, parameter: Tensor) -> Tensor | None:
        known = (masters_of(each) for each in self._optimizers)
        found = (None if masters is None else masters.kept(parameter) for masters in known)
        return next((master for master in found if master is not None), None)

    def rest_(self, velocity: Tensor) -> None:
        for name, part in self.views(velocity).items():
            if not self.parameters[name].requires_grad:
                part.zero_()

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        parts = zip(self.layout, self.layout.segments.views(flat), strict=True)
        return {entry.name: part.view(entry.shape) for entry, part in parts}

    def rates(self, optimizer: Optimizer) -> Iterator[tuple[float, slice]]:
        """Yield ranges of `flat` with their learning rates, 0 if frozen or in no optimiser."""
        pairs = ((each, float(group["lr"])) for group in optimizer.param_groups for each in group["params"])
        held = {each: rate for each, rate in pairs if each.requires_grad}
        for rate, run in groupby(self.layout, lambda entry: held.get(self.parameters[entry.name], 0.0)):
            entries = list(run)
            yield rate, slice(entries[0].offset, entries[-1].offset + entries[-1].numel)

    def check_views(self) -> None:
        start, item = self.flat.data_ptr(), self.flat.element_size()
        for entry in self.layout:
            parameter = self.parameters[entry.name]
            if parameter.dtype != torch.float32 or not parameter.numel():
                continue
            if parameter.data_ptr() != start + item * entry.offset:
                raise AttachError(MOVED.format(entry.name))

    def detach(self) -> None:
        """Give every parameter its own memory until the next `as_flat`, to save a part of the model."""
        for each in self.parameters.values():
            if each.dtype == torch.float32:
                each.data = each.detach().clone()
        self._detached = True

    def _attach(self) -> None:
        if not self._detached:
            return
        parts = [(self.parameters[name], view) for name, view in self.views(self.flat).items()]
        whole = [(each, view) for each, view in parts if each.dtype == torch.float32]
        if any(each.shape != view.shape or each.device != view.device for each, view in parts):
            raise AttachError(MOVED.format("a parameter"))
        self._detached = False
        for each, view in whole:
            view.copy_(each.detach())
            each.data = view

    def release(self) -> None:
        for parameter in self.parameters.values():
            parameter.data = parameter.detach().clone()
            if (master := self._master(parameter)) is not None:
                master.data = master.detach().clone()

    def adopt(self, comm: Comm, root: int = 0) -> None:
        comm.broadcast(self.flat, root)
        copy_from_root((*self.statistics, *self.constants, *self.frozen), comm, root)

    def adopt_frozen(self, comm: Comm, root: int) -> None:
        copy_from_root(self.frozen, comm, root)

    def distance(self, model: Tensor, comm: Comm) -> float:
        """Return the root mean square over ranks of |x_r - model|, over |model|. Called by all ranks."""
        apart = torch.dist(self.flat, model).double().square().view(1)
        mean = float(comm.all_reduce(apart)) / comm.size
        return math.sqrt(mean) / (float(model.norm()) or 1.0)

    def mean_statistics_(
        self, comm: Comm, among: int | None = None, counts: bool = True, *, load: bool = True
    ) -> None:
        """Replace every statistic by its mean over ranks, or over `among` of them. Called by all ranks.

        `counts`: whether this rank is one of them. Buffers equal on all ranks are unchanged: their mean may
        differ or not be finite. Nothing changes if a collective fails.
        """
        for each in self.statistics:
            own = each.detach().contiguous()
            none = float("inf")  # infinite entries times 0 would be NaN
            low = comm.all_reduce(own.clone() if counts else torch.full_like(own, none), "min")
            high = comm.all_reduce(own.clone() if counts else torch.full_like(own, -none), "max")
            mean = comm.all_reduce(own / (among or comm.size) if counts else torch.zeros_like(own))
            agreed = torch.where(low == high, low, mean)
            if load and not torch.equal(agreed, own):
                each.copy_(agreed)


def _in_order(value: Any, parameter: Tensor) -> Any:
    dense = isinstance(value, Tensor) and value.layout == torch.strided
    return value.contiguous() if dense and value.shape == parameter.shape else value


def _is_expanded(x: Tensor) -> bool:
    return any(size > 1 and not stride for size, stride in zip(x.shape, x.stride(), strict=True))
