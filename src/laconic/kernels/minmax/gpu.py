"""Min-max on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from laconic.core.deferred import check
from laconic.core.framing import consecutive, sent_to
from laconic.core.layout import Segments, apart
from laconic.kernels import dispatch
from laconic.kernels.launch import launch
from laconic.kernels.minmax.faults import FAULTS, check_flags
from laconic.kernels.minmax.form import MinMaxForm
from laconic.kernels.minmax.gpu_add import add_kernel, validate_kernel
from laconic.kernels.minmax.gpu_encode import encode_kernel
from laconic.kernels.minmax.gpu_tables import CHUNK, Tables, tables_of
from laconic.kernels.minmax.reference import not_finite

STACK = 8  # messages of the same segments per launch


def encode(x: Tensor, segments: Segments, keys: Tensor | None, form: MinMaxForm) -> Tensor:
    width, device = form.widths[0], x.device
    tables = tables_of((segments,), (0,), width, form.block, device, True)
    wire = torch.empty(form.message_nbytes(segments), dtype=torch.uint8, device=device)
    flags = torch.zeros(len(segments), dtype=torch.int32, device=device)
    drawn = sent_to(keys, device) if keys is not None and form.stochastic else flags
    fast = tables.aligned and x.data_ptr() % 16 == 0
    with dispatch.device_of(x):
        for table, grid, masked in tables.tiles:
            words = tables.words and not masked
            constants = (width, form.block, form.stochastic, masked, fast, words)
            launch(encode_kernel, grid, x, wire, drawn, flags, table, *constants)
    check(flags, lambda number: not_finite(number, segments))
    return wire


@dataclass(frozen=True)
class Plan:
    """Launches that add some messages.

    `stride`: bytes of each of `copies` messages. `rounds`: tables, first byte, number of messages.
    """

    heads: Tables
    rounds: tuple[tuple[Tables, int, int], ...]
    copies: int
    stride: int
    width: int
    block: int
    faults: int  # flags; one more is set with any


def add_messages_(
    wires: Sequence[Tensor],
    ranges: tuple[Segments, ...],
    out: Tensor,
    forms: tuple[MinMaxForm, ...],
    alpha: float,
    numbered: bool = True,
) -> Tensor:
    plan = _plan(ranges, forms, out.device)
    wire = consecutive(wires)
    flags = torch.zeros(plan.faults + 1, dtype=torch.int32, device=out.device)
    words, fast = wire.data_ptr() % 4 == 0, out.data_ptr() % 16 == 0
    with dispatch.device_of(out):
        heads, most = plan.heads, float((1 << plan.width) - 1)
        parts = (len(heads.heads), plan.copies)
        constants = (most, CHUNK, words and heads.words)
        launch(
            validate_kernel,
            parts,
            wire,
            plan.stride,
            flags,
            heads.heads,
            plan.faults,
            *constants,
            num_warps=4,
        )
        for tables, base, count in plan.rounds:
            for table, grid, masked in tables.tiles:
                how = (masked, fast and tables.aligned, words and tables.words and not masked)
                sizes = (count, plan.width, plan.block)
                launch(
                    add_kernel,
                    grid,
                    wire,
                    base,
                    plan.stride,
                    flags,
                    plan.faults,
                    out,
                    table,
                    float(alpha),
                    *sizes,
                    *how,
                )
    check_flags(flags, numbered)
    return out


@lru_cache(maxsize=256)
def _plan(ranges: tuple[Segments, ...], forms: tuple[MinMaxForm, ...], device: torch.device) -> Plan:
    block, width = forms[0].block, next(form.widths[0] for form in forms if form.widths)
    nbytes = [form.message_nbytes(segments) for segments, form in zip(ranges, forms, strict=True)]
    begins = tuple(accumulate(nbytes, initial=0))[:-1]
    copies, stride = 1, 0
    if all(each == ranges[0] for each in ranges):
        copies, stride = len(ranges), nbytes[0]
        every = tables_of(ranges[:1], (0,), width, block, device, False, stride)
        firsts = range(0, copies, STACK)
        rounds = tuple((every, at * stride, min(STACK, copies - at)) for at in firsts)
    else:
        every = tables_of(ranges, begins, width, block, device, False)
        rounds = ((every, 0, 1),)
        if not apart(ranges):
            pairs = zip(ranges, begins, strict=True)
            rounds = tuple(
                (tables_of((each,), (at,), width, block, device, False), 0, 1) for each, at in pairs
            )
    return Plan(every, rounds, copies, stride, width, block, len(ranges) * len(FAULTS))
