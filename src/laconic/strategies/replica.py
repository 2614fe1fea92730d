"""Replica: one rank's model as one flat tensor, of which its parameters are views.

Strategies that exchange parameters send this tensor directly: nothing is gathered from the model, and nothing
is copied back. The parameters stay the same objects, so the optimiser and its state stay valid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.comm.comm import Comm
from laconic.core.errors import AttachError
from laconic.core.layout import Layout


class Replica:
    """The trained parameters of one model: `flat` float32 (n,), laid out by `layout`.

    `statistics`: the floating-point buffers of the model, such as BatchNorm's running means. Nothing changes
    before `flatten`. Raises `AttachError` if no parameter is trained, if parameters are on several devices or
    not float32, or if the optimiser holds other tensors.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        named = ((name.replace("_orig_mod.", ""), each) for name, each in model.named_parameters())
        self.parameters = {name: each for name, each in named if each.requires_grad}
        self.statistics = tuple(each for each in model.buffers() if each.is_floating_point())
        self.layout = Layout.of((name, tuple(each.shape)) for name, each in self.parameters.items())
        self._check(optimizer)
        self.flat = torch.empty(0)

    def _check(self, optimizer: Optimizer) -> None:
        if not self.parameters:
            raise AttachError("this model has no parameter with requires_grad: there is nothing to train")
        first = next(iter(self.parameters.values()))
        for name, each in self.parameters.items():
            if each.dtype != torch.float32:
                raise AttachError(
                    f"{name} is {each.dtype}, but parameters that ranks exchange must be float32: keep them"
                    " float32, and compute in low precision under torch.autocast"
                )
            if each.device != first.device:
                raise AttachError(
                    f"{name} is on {each.device}, others on {first.device}: put all on one device"
                )
        own = set(self.parameters.values())
        strangers = [p for group in optimizer.param_groups for p in group["params"] if p not in own]
        if any(stranger.requires_grad for stranger in strangers):
            raise AttachError(
                f"the optimiser holds a parameter of shape {tuple(strangers[0].shape)} that is not in the"
                " model: build the optimiser from this model's parameters()"
            )

    def flatten(self) -> None:
        """Copy all parameters into one tensor, and make them views of it."""
        device = next(iter(self.parameters.values())).device
        self.flat = torch.empty(self.layout.numel, device=device)
        for name, view in self.views(self.flat).items():
            view.copy_(self.parameters[name].detach())
            self.parameters[name].data = view

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of flat (n,), in its shape."""
        parts = zip(self.layout, self.layout.segments.views(flat), strict=True)
        return {entry.name: part.view(entry.shape) for entry, part in parts}

    def rates(self, optimizer: Optimizer) -> Iterator[tuple[float, slice]]:
        """Ranges of `flat` with their present learning rates; 0 for parameters outside the optimiser."""
        held = {each: float(group["lr"]) for group in optimizer.param_groups for each in group["params"]}
        for rate, run in groupby(self.layout, lambda entry: held.get(self.parameters[entry.name], 0.0)):
            entries = list(run)
            yield rate, slice(entries[0].offset, entries[-1].offset + entries[-1].numel)

    def check_views(self) -> None:
        """Raise `AttachError` if a parameter is no longer a view of `flat`."""
        start, item = self.flat.data_ptr(), self.flat.element_size()
        for entry in self.layout:
            if self.parameters[entry.name].data_ptr() != start + item * entry.offset:
                raise AttachError(
                    f"the memory of {entry.name} was replaced after distribute(), as model.to(...) does: move"
                    " the model first, then call distribute()"
                )

    def release(self) -> None:
        """Give every parameter its own memory again."""
        for parameter in self.parameters.values():
            parameter.data = parameter.detach().clone()

    def adopt(self, comm: Comm, root: int = 0) -> None:
        """Copy the root's parameters and statistics. Called by all ranks."""
        for tensor in (self.flat, *self.statistics):
            comm.broadcast(tensor, root)

    def distance(self, model: Tensor, comm: Comm) -> float:
        """Root mean square over ranks of |x_r - model|, over |model|. Called by all ranks."""
        apart = torch.dist(self.flat, model).double().square().view(1)
        mean = float(comm.all_reduce(apart)) / comm.size
        return math.sqrt(mean) / (float(model.norm()) or 1.0)

    def mean_statistics_(self, comm: Comm) -> None:
        """Replace every statistic by its mean over ranks. Called by all ranks."""
        for each in self.statistics:
            comm.all_reduce(each).div_(comm.size)
