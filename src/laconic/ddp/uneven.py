"""Steps of a rank without further inputs, for methods that exchange in `optimizer.step()`.

`torch.distributed.algorithms.Join` continues only DDP's collectives, so the handle takes each step of the
other ranks too, with the mean from DDP's hook, or zero for local gradients. At the end every rank copies the
last one with inputs, as schedules and clipping continued only there.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from laconic.core.errors import AttachError
from laconic.ddp.buckets import Buckets
from laconic.ddp.optimiser import Optimisers
from laconic.exchange.rule import OptimiserView


class JoinedModel:
    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)
        self.group: dist.ProcessGroup = model.process_group
        self.device: torch.device = model.device if model.device is not None else torch.device("cpu")
        self.leaves_out = bool(model.find_unused_parameters or model.static_graph)

    @property
    def config(self) -> Any:
        """Settings of the model's last `Join`, even if it has ended."""
        config = getattr(self._model(), "_join_config", None)
        return config if config and config.enable else None


class UnevenInputs(JoinHook):
    def __init__(
        self,
        model: JoinedModel,
        buckets: Buckets,
        optimisers: Optimisers,
    ) -> None:
        self._model = model
        self._buckets = buckets
        self._exchange = buckets.exchange
        self._method = repr(buckets.exchange.method)
        self._optimisers = optimisers
        self._joinable: Joinable | None = None  # the handle, or its replacement
        self._taken = -1
        self._stepping = False
        self._together: tuple[Any, Any] = (None, None)  # configs of handle and model in one Join

    def begin(self, joinable: Joinable) -> None:
        if self._model.leaves_out:
            raise AttachError(
                f"{self._method} exchanges inside optimizer.step(), and a rank without further inputs cannot"
                " know which parameters the others used: build the DistributedDataParallel without"
                " find_unused_parameters and static_graph, or give all ranks the same number of batches"
            )
        self._joinable = joinable
        self._buckets.keep_all_means(True)

    def before_step(self, optimiser: OptimiserView, step: int) -> None:
        self._check()
        self._taken = step

    def _check(self) -> None:
        config, own = self._model.config, getattr(self._joinable, "_join_config", None)
        if config is None or self._stepping:
            return
        if own is not self._together[0]:
            self._together = (own, config)
        if own is None or not own.enable or own.is_first_joinable or self._together[1] is not config:
            raise AttachError(
                f"{self._method} exchanges inside optimizer.step(), and a rank that has run out of inputs"
                " takes no steps unless Join has the handle too, after the model: with"
                " Join([model, handle]); with laconic.distribute, Join([model, optimizer])"
            )

    def main_hook(self) -> None:
        exchange = self._exchange
        if exchange.step - 1 == self._taken or exchange.skip_reason is not None:
            return
        kept: list[tuple[Tensor, Tensor | None]] = []
        for name, mean in self._buckets.means.items():
            parameter = self._optimisers.hooks[0].parameter(name)
            kept.append((parameter, parameter.grad))
            parameter.grad = mean.as_gradient_of(parameter)
        self._stepping = True
        try:
            for each in self._optimisers.hooks:
                each.optimiser.step()
        finally:
            self._stepping = False
            for parameter, grad in kept:
                parameter.grad = grad

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the last rank with inputs; of several, the one with the largest number."""
        self._buckets.keep_all_means(False)
        rules, comm = self._exchange.rules, self._exchange.comm
        for rule in rules:
            rule.close()
        mine = torch.tensor(
            [comm.rank if is_last_joiner else -1], device=self._model.device, dtype=torch.int64
        )
        root = int(comm.all_reduce(mine, "max"))
        for rule in rules:
            rule.follow(root)
