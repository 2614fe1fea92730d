"""Masked: reduction of the entries in use, as values without positions, for sparse training.

All ranks know the entries in use (`laconic.sparsity`; without masks all). Memory is unchanged for entries
that stay in use, cleared for dropped ones, zero for new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.indices.golomb import GOLOMB
from laconic.codecs.sparse import Sparse
from laconic.comm.comm import Comm
from laconic.comm.messages import Sent
from laconic.core import arguments, deferred
from laconic.core.codec import Codec
from laconic.core.errors import SpecError
from laconic.core.layout import Layout, PerLayout
from laconic.core.mask import Mask
from laconic.core.selector import Selector
from laconic.core.spec import Status
from laconic.core.turn import Turn
from laconic.reducers import BoundReducer, Composition, Gathering, Reducer
from laconic.reducers.gather import Gather
from laconic.reducers.sum import Sum

Arguments = tuple[Tensor | None, Layout, Turn, Tensor, float]  # of `reduce`
HELD_FOR_ALL = "once/"  # prefix of state in which one rank holds each entry: see `laconic.resize`


@dataclass(frozen=True, repr=False)
class Masked(Reducer):
    """Mean of the entries in use by `inner`: a codec, selector or reducer, or, for `compress`, a method.

    Payload: that of `inner` for the entries in use. To `inner`, a masked tensor is a vector: `powersgd` finds
    no matrix in it. It must be outermost: masked(two_level(...)).

    >>> from laconic.core.spec import parse
    >>> parse("masked(gather(cast('bf16')))"), parse("masked(cgx(bits=4))")
    (masked(gather(cast(dtype='bf16'))), masked(inner=cgx()))
    """

    inner: Codec | Selector | Reducer | Composition

    status: ClassVar[Status] = "own"
    examples: ClassVar[tuple[str, ...]] = (
        "masked(sum())",
        "masked(gather(cast('bf16')))",
        "masked(scatter_reduce(minmax(bits=2, block=16), feedback='both'))",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.inner, (Codec, Selector, Composition)):
            arguments.piece("masked: inner", self.inner, Reducer, "sum(), or a codec such as cast('bf16')")
        if isinstance(self.inner, Masked):
            raise SpecError(f"masked cannot be nested, got {self.inner!r}: remove one masked")

    @property
    def reducer(self) -> Reducer:
        """Reducer of the entries in use. Raises `SpecError` if `inner` is a method."""
        if isinstance(self.inner, Composition):
            raise SpecError(
                f"masked with a method, {self.inner!r}, is a method: `compress` and `distribute` take it,"
                " but a reducer is needed here, such as gather(cast('bf16'))"
            )
        if isinstance(self.inner, Reducer):
            return self.inner
        codec = Sparse(self.inner, indices=GOLOMB) if isinstance(self.inner, Selector) else self.inner
        return Sum() if codec.lossless else Gather(codec)

    @property
    def exact_mean(self) -> bool:
        return self.reducer.exact_mean

    @property
    def unaccountable(self) -> str | None:
        return self.reducer.unaccountable

    @property
    def adaptive(self) -> bool:
        return self.reducer.adaptive

    @property
    def needs_feedback(self) -> bool:
        return self.reducer.needs_feedback

    def gathers(self, size: int) -> tuple[Gathering, ...]:
        return self.reducer.gathers(size)

    def feedback_codec(self) -> Codec | None:
        return self.reducer.feedback_codec()

    def bind(self, layout: Layout, comm: Comm) -> BoundReducer:
        return BoundMasked(self.reducer, layout, comm)

    def nbytes(self, layout: Layout) -> int:
        return self.reducer.nbytes(layout)


@dataclass(frozen=True)
class Packing:
    """Entries in use. `layout`: packed tensors; `positions` int64 (k,): in the flat buffer."""

    layout: Layout
    positions: Tensor


@dataclass(frozen=True)
class PackedShare(Sent):
    share: Sent
    packing: Packing

    def add_to_(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        packed = self.share.add_to_(x[self.packing.positions], alpha)
        return x.index_copy_(0, self.packing.positions, packed)

    def clear_(self, memory: Tensor) -> Tensor:
        packed = self.share.clear_(memory[self.packing.positions])
        return memory.index_copy_(0, self.packing.positions, packed)


class BoundMasked(BoundReducer):
    def __init__(self, spec: Reducer, layout: Layout, comm: Comm) -> None:
        self._spec, self._layout, self._comm = spec, layout, comm
        self._masks: dict[str, Mask] = {}
        self._packings: PerLayout[Packing] = PerLayout(self._packing)
        self._loaded: dict[str, Tensor] | None = None  # until the next step
        self._released: dict[str, Tensor] | None = None  # during the next step
        self._inner = spec.bind(layout, comm)

    @property
    def detects_non_finite(self) -> bool:
        return self._inner.detects_non_finite

    @property
    def own_shapes(self) -> tuple[str, ...]:
        return self._inner.own_shapes

    @property
    def holds_back(self) -> bool:
        return self._inner.holds_back

    @property
    def remembers(self) -> bool:
        return self._inner.remembers

    @property
    def checks_mean(self) -> bool:
        return self._inner.checks_mean

    @property
    def overlaps(self) -> bool:
        return self._inner.overlaps

    def writes_late(self, step: int) -> bool:
        return self._inner.writes_late(step)

    def reduce(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Sent | None:
        arguments, unpack = self._packed(x, layout, turn, out, alpha)
        return unpack(self._inner.reduce(*arguments))

    def begin(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float = 1.0
    ) -> Callable[[], Sent | None]:
        arguments, unpack = self._packed(x, layout, turn, out, alpha)
        end = self._inner.begin(*arguments)
        return lambda: unpack(end())

    def _packed(
        self, x: Tensor | None, layout: Layout, turn: Turn, out: Tensor, alpha: float
    ) -> tuple[Arguments, Callable[[Sent | None], Sent | None]]:
        if self._loaded is not None:  # a skipped step restores it
            self._released, self._loaded = self._loaded, None
        if self._masks.keys().isdisjoint(layout.names):
            return (x, layout, turn, out, alpha), lambda share: share
        packing = self._packings(layout)
        packed = None if x is None else x[packing.positions]
        mean = packed if packed is not None and x is out else out[packing.positions]
        unpack = partial(self._unpacked, mean, layout, packing, out)
        return (packed, packing.layout, turn, mean, alpha), unpack

    def put_back(self, layout: Layout) -> None:
        if self._released is not None:
            self._loaded = self._released
        self._inner.put_back(self._packed_layout(layout))

    def _packed_layout(self, layout: Layout) -> Layout:
        return layout if self._masks.keys().isdisjoint(layout.names) else self._packings(layout).layout

    def accept(self, layout: Layout) -> None:
        self._released = None
        self._inner.accept(self._packed_layout(layout))

    def discard(self) -> None:
        self._inner.discard()

    def remask(self, masks: Mapping[str, Mask]) -> None:
        state = self.state_dict()
        before = self._packing(self._layout).layout
        self._masks = {name: mask for name, mask in masks.items() if name in self._layout.names}
        after = self._packing(self._layout).layout
        if after == before:  # inner layouts are known by identity
            self._packings.refresh(lambda layout, old: Packing(old.layout, self._positions(layout)))
        else:
            self._packings.clear()
            self._inner = self._spec.bind(after if self._masks else self._layout, self._comm)
        self._loaded = self._released = None
        if state:
            self._inner.load_state_dict(self._narrowed(self._agreed(state)))

    def state_dict(self) -> dict[str, Tensor]:
        if self._loaded is not None:
            return dict(self._loaded)
        return self._widened(self._inner.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._inner.load_state_dict(self._narrowed(state))
        self._loaded = dict(state)  # its masks may be loaded later

    def _unpacked(
        self, mean: Tensor, layout: Layout, packing: Packing, out: Tensor, share: Sent | None
    ) -> Sent | None:
        if share is None:
            return None
        deferred.write(lambda: layout.segments.zero_(out).index_copy_(0, packing.positions, mean))
        return PackedShare(share, packing)

    def _packing(self, layout: Layout) -> Packing:
        counts = {name: (mask.positions.numel(),) for name, mask in self._masks.items()}
        shapes = ((entry.name, counts.get(entry.name, entry.shape)) for entry in layout)
        return Packing(Layout.of(shapes), self._positions(layout))

    def _positions(self, layout: Layout) -> Tensor:
        device = next((mask.positions.device for mask in self._masks.values()), torch.device("cpu"))
        parts = [
            self._masks[entry.name].positions + entry.offset
            if entry.name in self._masks
            else torch.arange(entry.offset, entry.offset + entry.numel, device=device, dtype=torch.int64)
            for entry in layout
        ]
        return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *parts])

    def _named(self, key: str) -> tuple[str, Mask | None]:
        name = key.rpartition("/")[2]
        return name, None if key.startswith(self._inner.own_shapes) else self._masks.get(name)

    def _widened(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made = dict(state)
        for key, value in state.items():
            name, mask = self._named(key)
            if mask is not None and value.shape == mask.positions.shape:
                made[key] = value.new_zeros(self._layout[name].shape)
                made[key].view(-1).index_copy_(0, mask.positions.to(value.device), value)
        return made

    def _narrowed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made = dict(state)
        for key, value in state.items():
            name, mask = self._named(key)
            if mask is not None and tuple(value.shape) == self._layout[name].shape:
                made[key] = value.flatten()[mask.positions.to(value.device)]
        return made

    def _agreed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return, on every rank, state that one rank holds for all: new masks may change its owner."""
        made = dict(state)
        for key in sorted(state):
            if key.startswith(HELD_FOR_ALL) and state[key].is_floating_point():
                highest = self._comm.all_reduce(state[key].flatten().clamp(min=0), "max")
                lowest = self._comm.all_reduce(state[key].flatten().clamp(max=0), "min")
                made[key] = (highest + lowest).view(state[key].shape)
        return made
