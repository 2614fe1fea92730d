"""Adaptive bits: a bit width per tensor, with fewer bytes at the total error of one width for all.

After CGX (Markov et al. 2022, arXiv:2111.08617) [recalled; its public code has uniform widths], which
clusters layers by size and norm. Here, every `every` steps, with widths b = 2..8 and tensors l:

    1. E_l(b) = sum over ranks of |C_b(x_l) - x_l|^2, really encoded     one all_reduce, 56 bytes per tensor
    2. the b_l that minimise the sum of bytes_l(b_l), with sum of E_l(b_l) <= sum of E_l(bits)
    3. from the next step on, tensor l is sent in b_l bits

`python -m benchmarks.widths` measures the saving.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, get_args

import torch
from torch import Tensor

from laconic import kernels
from laconic.codecs.minmax import MinMax, Rounding
from laconic.comm.comm import Comm
from laconic.comm.messages import Sent
from laconic.comm.partition import piece
from laconic.comm.skippable import sum_or_skip
from laconic.core import arguments
from laconic.core.codec import Codec
from laconic.core.errors import StateError
from laconic.core.layout import Layout
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.feedback.memory import Pending
from laconic.reducers import BoundReducer, Reducer
from laconic.reducers.scatter_reduce import Pattern, TwoHalves, most_nbytes
from laconic.reducers.scatter_reduce.cuts import cuts
from laconic.reducers.scatter_reduce.widths import Widths, cheapest

CHOICE = tuple(range(2, 9))
ERRORS = "once/errors/"  # prefix of state keys with one error per width


@dataclass(frozen=True, repr=False)
class AdaptiveBits(Reducer):
    """`scatter_reduce(minmax(bits))` with widths of 2 to 8 for each tensor, chosen again every `every` steps.

    All tensors start with `bits`; the first choice uses step 0. Each measurement encodes a tensor seven times
    more.

    Payload: at most that of `bits` for all, and 56 bytes per tensor at the steps that measure. State: the
    widths, and the errors for the next choice; equal on all ranks.

    >>> AdaptiveBits(every=500)
    adaptive_bits(every=500)
    """

    bits: int = 4
    block: int = 512
    rounding: Rounding = "nearest"
    pattern: Pattern = "direct"
    every: int = 100

    paper: ClassVar[str] = "Markov et al. 2022, arXiv:2111.08617"
    status: ClassVar[Status] = "recalled"
    examples: ClassVar[tuple[str, ...]] = (
        "adaptive_bits(every=3)",
        "adaptive_bits(bits=3, block=100, rounding='stochastic', pattern='ring', every=2)",
    )

    def __post_init__(self) -> None:
        arguments.whole("adaptive_bits: bits", self.bits, CHOICE[0], CHOICE[-1])
        arguments.choice("adaptive_bits: pattern", self.pattern, get_args(Pattern))
        arguments.whole("adaptive_bits: every", self.every, 1)
        MinMax(self.bits, self.block, self.rounding)  # rejects values that a wire cannot have

    @property
    def exact_mean(self) -> bool:
        return False

    @property
    def unaccountable(self) -> str | None:
        return "the widths change, so a tensor's loss has no permanent bound"

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return _AdaptiveBits(self, layout, comm)

    def nbytes(self, layout: Layout) -> int:
        uniform = most_nbytes(MinMax(self.bits, self.block), layout) + 4 * (self.pattern != "direct")
        return uniform + 8 * len(CHOICE) * max(1, len(layout))


class _AdaptiveBits(BoundReducer):
    def __init__(self, spec: AdaptiveBits, layout: Layout, comm: Comm) -> None:
        self._spec = spec
        self._layout = layout
        self._comm = comm
        self._halves = TwoHalves(layout, comm, spec.pattern, self._codec)
        self._bits = dict.fromkeys(layout.names, spec.bits)
        self._errors: dict[str, tuple[float, ...]] = {}
        self._pending = Pending(self._measured)
        self._before: tuple[int, dict[str, int], dict[str, tuple[float, ...]]] | None = None  # a choice
        bounds = cuts(layout, comm.size)
        self._tensor_of = {
            piece(entry, begin, end).name: entry.name
            for entry in layout
            for begin, end in pairwise(bounds[entry.name])
        }

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        self._pending.finish_before(turn.step)
        if self._before is not None and self._before[0] != turn.step:
            self._before = None
        if len(self._errors) == len(self._layout):
            self._before = turn.step, dict(self._bits), dict(self._errors)
            self._choose()
        if turn.step % self._spec.every:
            return self._halves.reduce(x, layout, turn, out, alpha)
        own = None if x is None else self._measure(x, layout, turn)
        size = len(layout) * len(CHOICE)
        errors = sum_or_skip(self._comm, own, size, out.device, torch.float64)
        if errors is None:
            return None
        sent = self._halves.reduce(x, layout, turn, out, alpha)
        if sent is not None:
            self._pending.add(errors.view(len(layout), len(CHOICE)), layout, turn.step)
        return sent

    def _measure(self, x: Tensor, layout: Layout, turn: Turn) -> Tensor:
        errors = torch.zeros(len(layout), len(CHOICE), dtype=torch.float64, device=x.device)
        segments, keys = layout.segments, [turn.own(name) for name in layout.names]
        for column, bits in enumerate(CHOICE):
            form = kernels.MinMaxForm((bits,) * len(segments), self._spec.block, self._spec.rounding)
            wire = kernels.minmax_encode(x, segments, keys, form)
            lost = kernels.minmax_add_(wire, segments, x.clone(), form, -1.0)
            for row, view in enumerate(segments.views(lost)):
                errors[row, column] = torch.linalg.vector_norm(view, dtype=torch.float64).square()
        return errors.view(-1)

    def _measured(self, errors: Tensor, layout: Layout) -> None:
        for name, row in zip(layout.names, errors.tolist(), strict=True):
            self._errors[name] = tuple(row)

    def _choose(self) -> None:
        """Choose new widths for all tensors; keep the old ones if nothing is lost or none is shorter.

        A tensor without error gets `bits`.
        """
        uniform = CHOICE.index(self._spec.bits)
        errors = [self._errors[entry.name] for entry in self._layout]
        costs = [
            [kernels.minmax_nbytes(entry.numel, bits, self._spec.block) for bits in CHOICE]
            for entry in self._layout
        ]
        allowed = math.fsum(row[uniform] for row in errors)
        self._errors.clear()
        if not 0 < allowed < math.inf:
            return

        def total(options: Iterable[int]) -> int:
            return sum(row[i] for row, i in zip(costs, options, strict=True))

        alike = [uniform] * len(errors)
        free = cheapest(costs, errors, allowed) or alike
        chosen = [option if any(row) else uniform for option, row in zip(free, errors, strict=True)]
        self._bits = {
            name: CHOICE[i] for name, i in zip(self._layout.names, min(alike, chosen, key=total), strict=True)
        }

    def _codec(self, part: Layout, step: int) -> Codec:
        widths = tuple(self._bits[self._tensor_of[name]] for name in part.names)
        return Widths(widths, self._spec.block, self._spec.rounding)

    @property
    def own_shapes(self) -> tuple[str, ...]:
        return (ERRORS,)

    def put_back(self, layout: Layout) -> None:
        self._pending.drop(layout)
        if self._before is not None:
            _, self._bits, self._errors = self._before
            self._before = None

    def accept(self, layout: Layout) -> None:
        self._before = None

    def state_dict(self) -> dict[str, Tensor]:
        self._pending.finish_all()
        state = {}
        for name in self._layout.names:
            state[f"once/bits/{name}"] = torch.tensor(self._bits[name], dtype=torch.int64, device="cpu")
            errors = self._errors.get(name, (-1.0,) * len(CHOICE))  # not measured
            state[ERRORS + name] = torch.tensor(errors, dtype=torch.float64, device="cpu")
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._pending.finish_all()
        bits = {name: int(state[f"once/bits/{name}"]) for name in self._layout.names}
        wrong = next((name for name, width in bits.items() if width not in CHOICE), None)
        if wrong is not None:
            raise StateError(
                f"{wrong} has a width of {bits[wrong]} bits in the saved state, it must be 2 to 8"
            )
        errors = {name: tuple(state[ERRORS + name].tolist()) for name in self._layout.names}
        self._before = None
        self._bits, self._errors = bits, {name: row for name, row in errors.items() if row[0] >= 0}
