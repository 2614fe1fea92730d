"""Probe of a training script on its machines."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.comm.gather_text import gather_text
from laconic.comm.torch_comm import TorchComm
from laconic.core.errors import AttachError
from laconic.core.layout import Layout
from laconic.exchange.method import Method
from laconic.optim.unwrapping import is_ours
from laconic.strategies.strategy import Strategy
from laconic.tools.plan.contenders import contenders, rehearse_all
from laconic.tools.plan.probe import Probe, layout_of, probe_network, probe_pairs, probe_work
from laconic.tools.plan.rehearsal import Rehearsed


def probe_script(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[], Tensor],
    specs: Sequence[str] = (),
    *,
    group: dist.ProcessGroup | None = None,
    told: Callable[[str], object] | None = None,
) -> Probe:
    """Measure links, a training step and costs of methods, for `laconic plan`.

    All ranks call it before `laconic.compress` or `laconic.distribute`. It runs a dozen steps, then restores
    model, optimiser, gradients and random generators.

        probe_script(model, optimizer, lambda: loss_of(model(x), y)).write("probe.json")

    Args:
        model: The model, also in DistributedDataParallel.
        optimizer: Its optimiser.
        loss: Runs forward on a batch and returns the loss.
        specs: Methods and strategies to measure, besides `dense()`; default: common ones.
        group: The process group; default: all ranks.
        told: Callback on rank 0 with the next measurement's name.

    Returns:
        The measurements, equal on all ranks.

    Raises:
        SpecError: A spec is invalid, or its cost cannot be measured in one process.
        AttachError: There is one rank, or the optimiser is distributed.
    """
    asked = contenders(specs)
    if is_ours(optimizer):
        raise AttachError("this model is distributed already: probe it before laconic.distribute()")
    comm = TorchComm(group)
    if comm.size == 1:
        raise AttachError("one worker has no link to probe: start 2 workers or more")
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    cores = (os.cpu_count() or 1) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    tell = told if told is not None and comm.rank == 0 else _in_silence
    tell("links, all at once and while workers compute")
    network = probe_network(comm)
    tell("links, pair by pair")
    pairs = probe_pairs(comm)
    tell("a training step")
    alone = model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
    with _undone(plain, optimizer), alone:
        work = probe_work(plain, loss, optimizer, comm, cores)
    layout = layout_of(plain)
    named = tuple((entry.name, entry.shape) for entry in layout)
    found = Probe(comm.size, pairs, network, work, named)
    if comm.rank == 0:
        found = replace(found, methods=tuple(_rehearsed(asked, layout, tell)))
    return Probe.read(gather_text(comm, found.json())[0])


def _in_silence(what: str) -> None:
    """Report nothing."""


def _rehearsed(
    asked: Sequence[Method | Strategy], layout: Layout, tell: Callable[[str], object]
) -> Iterator[Rehearsed]:
    tell(f"encoding and decoding of {len(asked)} methods")
    for number, each in enumerate(rehearse_all(asked, layout), 1):
        tell(f"encoding and decoding, {number} of {len(asked)} done: {each.spec}")
        yield each


@contextmanager
def _undone(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    tensors = [each for each in (*model.parameters(), *model.buffers())]
    kept = [each.detach().clone() for each in tensors]
    gradients = [each.grad for each in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for each, value in zip(tensors, kept, strict=True):
                each.copy_(value)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.load_state_dict(state)
