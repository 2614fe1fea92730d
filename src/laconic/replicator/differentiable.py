"""Differentiable collectives: sum, gather and broadcast over the replicas of a group.

Each replica has its own loss L_r, and gradients are those of sum_r L_r:

    y = sum_r x_r        on every replica     dL/dx_r = sum_s dL_s/dy_s          another sum
    y = [x_0, x_1, ...]  on every replica     dL/dx_r = sum_s (dL_s/dy_s)[r]     a reduce-scatter
    y = x_root           on every replica     dL/dx_root = sum_s dL_s/dy_s       a sum, used by the root

All replicas must run their backward passes, which communicate, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from laconic.comm.comm import Comm
from laconic.comm.gather_text import gather_numbers
from laconic.replicator.order import Order


class Group:
    def __init__(self, comm: Comm, order: Order) -> None:
        self.comm, self.order = comm, order

    def sums(self, tensors: Sequence[Tensor], what: str, *parts: object) -> list[Tensor]:
        tensors = [each.long() if each.dtype is torch.bool else each for each in tensors]
        note = self.order.note(what, *parts)
        return list(_AllSum.apply(self, note, *tensors)) if tensors else []  # type: ignore[no-untyped-call]

    def gathers(self, tensors: Sequence[Tensor], what: str, *parts: object) -> list[Tensor]:
        note = self.order.note(what, *parts)
        made: list[Tensor] = []
        for each in tensors:
            rows = each.unsqueeze(0) if not each.dim() else each
            made.append(_AllGather.apply(self, note, rows))  # type: ignore[no-untyped-call]
        return made

    def broadcasts(self, tensors: Sequence[Tensor], root: int, what: str, *parts: object) -> list[Tensor]:
        note = self.order.note(what, *parts)
        return [_Broadcast.apply(self, note, root, each) for each in tensors]  # type: ignore[no-untyped-call]


class _AllSum(Function):
    @staticmethod
    def forward(ctx: Any, group: Group, note: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.note = group, note
        group.order.check(note)
        made = by_kind(tensors, group.comm.all_reduce)
        ctx.mark_non_differentiable(*(each for each in made if not differentiable(each)))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        floating = [i for i, each in enumerate(grads) if each is not None and differentiable(each)]
        note = f"the backward pass of {ctx.note}"
        sums = _AllSum.apply(ctx.group, note, *(grads[i] for i in floating))  # type: ignore[no-untyped-call]
        found = dict(zip(floating, sums, strict=True))
        return None, None, *(found.get(i) for i in range(len(grads)))


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, group: Group, note: str, x: Tensor) -> Tensor:
        group.order.check(note)
        every = _rows_of_all(group.comm, x.detach())
        ctx.group, ctx.note, ctx.rows = group, note, [len(each) for each in every]
        made = torch.cat(every)
        if not differentiable(made):
            ctx.mark_non_differentiable(made)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        note = f"the backward pass of {ctx.note}"
        return None, None, _Scatter.apply(ctx.group, note, ctx.rows, grad)  # type: ignore[no-untyped-call]


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, group: Group, note: str, rows: list[int], x: Tensor) -> Tensor:
        ctx.group, ctx.note = group, note
        group.order.check(note)
        return group.comm.reduce_scatter([each.contiguous() for each in torch.split(x.detach(), rows)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        note = f"the backward pass of {ctx.note}"
        return None, None, None, _AllGather.apply(ctx.group, note, grad)  # type: ignore[no-untyped-call]


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, group: Group, note: str, root: int, x: Tensor) -> Tensor:
        ctx.group, ctx.note, ctx.root = group, note, root
        group.order.check(note)
        made = group.comm.broadcast(x.detach().clone(memory_format=torch.contiguous_format), root)
        if not differentiable(made):
            ctx.mark_non_differentiable(made)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        note = f"the backward pass of {ctx.note}"
        (total,) = _AllSum.apply(ctx.group, note, grad)  # type: ignore[no-untyped-call]
        return None, None, None, total if ctx.group.comm.rank == ctx.root else torch.zeros_like(total)


def _rows_of_all(comm: Comm, x: Tensor) -> list[Tensor]:
    """Return each replica's rows. Rows without elements need a message with their number."""
    one = x.shape[1:]
    if one.numel():
        return [each.view(-1, *one) for each in comm.all_gather(x.contiguous().view(-1))]
    return [x.new_empty(rows, *one) for (rows,) in gather_numbers(comm, len(x))]


def differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def by_kind(tensors: Sequence[Tensor], combine: Callable[[Tensor], Tensor]) -> list[Tensor]:
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, each in enumerate(tensors):
        kinds.setdefault((each.dtype, each.device), []).append(i)
    made: dict[int, Tensor] = {}
    for places in kinds.values():
        flat = combine(torch.cat([tensors[i].detach().reshape(-1) for i in places]))
        parts = torch.split(flat, [tensors[i].numel() for i in places])
        made |= {i: part.view(tensors[i].shape) for i, part in zip(places, parts, strict=True)}
    if len(tensors) > 1:  # callers may write to outputs
        return [made[i].clone() for i in range(len(tensors))]
    return [made[i] for i in range(len(tensors))]
