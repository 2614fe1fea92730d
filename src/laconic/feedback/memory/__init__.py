"""Named float32 memory in flat blocks that follow DDP's buckets.

When DDP regroups its buckets, blocks are rebuilt and each tensor moves by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor

from laconic.core.errors import StateError
from laconic.core.layout import Entry, Layout
from laconic.core.memory_order import flat
from laconic.feedback import Optimised

T = TypeVar("T")


class Memory:
    """One float32 value for every element, zero at first.

    >>> layout = Layout.of([("a", (2,)), ("b", (3,))])
    >>> memory = Memory("residual", layout)
    >>> memory.flat(layout, torch.device("cpu")).shape
    torch.Size([5])
    """

    def __init__(self, kind: str, layout: Layout) -> None:
        self.kind = kind
        self._layout = layout
        self._blocks: dict[int, tuple[Layout, Tensor]] = {}  # by id of a bucket's layout
        self._tensors: dict[str, Tensor] = {}

    def flat(self, layout: Layout, device: torch.device) -> Tensor:
        """Return these tensors' block: float32 (layout.segments.end,)."""
        block = self._blocks.get(id(layout))
        return block[1] if block is not None else self._move(layout, device)

    def held(self, layout: Layout) -> Tensor:
        return self._blocks[id(layout)][1]

    def tensor(self, name: str) -> Tensor | None:
        return self._tensors.get(name)

    @property
    def device(self) -> torch.device:
        held = next(iter(self._tensors.values()), None)
        return torch.device("cpu") if held is None else held.device

    def set(self, entry: Entry, value: Tensor) -> None:
        held = self._tensors.get(entry.name)
        if held is None:
            self._tensors[entry.name] = value.clone()
        else:
            held.copy_(value)

    def swap(self, other: Memory, layout: Layout) -> None:
        key = id(layout)
        self._blocks[key], other._blocks[key] = other._blocks[key], self._blocks[key]
        for name in layout.names:
            self._tensors[name], other._tensors[name] = other._tensors[name], self._tensors[name]

    def zero_(self) -> None:
        for held in self._tensors.values():
            held.zero_()

    def _move(self, layout: Layout, device: torch.device) -> Tensor:
        block = torch.zeros(layout.segments.end, dtype=torch.float32, device=device)
        for entry in layout:
            view = block[entry.offset : entry.offset + entry.numel]
            before = self._tensors.get(entry.name)
            if before is not None:
                view.copy_(before)
            self._tensors[entry.name] = view
        moved = set(layout.names)
        self._blocks = {
            key: (other, flat) for key, (other, flat) in self._blocks.items() if moved.isdisjoint(other.names)
        }
        self._blocks[id(layout)] = (layout, block)
        return block

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{self.kind}/{entry.name}": self._copy(entry) for entry in self._layout}

    def _copy(self, entry: Entry) -> Tensor:
        held = self._tensors.get(entry.name)
        if held is None:
            return torch.zeros(entry.shape, dtype=torch.float32, device=self.device)
        return held.detach().clone().view(entry.shape)

    def check(self, state: Mapping[str, Tensor]) -> None:
        for entry in self._layout:
            key = f"{self.kind}/{entry.name}"
            if key not in state:
                raise StateError(f"the saved state has no {key}: it is of another model or method")
            if tuple(state[key].shape) != entry.shape:
                raise StateError(
                    f"{key} has shape {tuple(state[key].shape)} in the saved state, here {entry.shape}"
                )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.check(state)
        for entry in self._layout:
            self.set(entry, state[f"{self.kind}/{entry.name}"].to(torch.float32).flatten())


class Velocity(Memory):
    """One float32 per element.

    `started`: whether a step has used it; before that, all momentum is in the optimiser.
    """

    def __init__(self, layout: Layout, optimised: Optimised) -> None:
        super().__init__("velocity", layout)
        self._optimised = optimised
        self.started = False
        self._began = -1
        self._replaced: dict[str, Tensor | None] = {}

    def start(self, step: int) -> None:
        """Continue the optimiser's momentum before the first step."""
        if self.started:
            if step != self._began:
                self._replaced.clear()
            return
        self.started, self._began = True, step
        self._replaced.clear()
        for entry in self._layout:
            buffer = self._optimised.momentum_buffer(entry.name)
            if buffer is not None:
                old = self.tensor(entry.name)
                self._replaced[entry.name] = None if old is None else old.clone()
                settings = self._optimised.settings(entry.name)
                factor = float(settings["momentum"]) if settings.get("nesterov") else 1.0
                factor *= -1.0 if settings.get("maximize") else 1.0
                self.set(entry, flat(buffer.detach().to(torch.float32)) * factor)

    def put_back(self) -> None:
        """Undo `start`."""
        for name, old in self._replaced.items():
            held = self.tensor(name)
            assert held is not None
            held.zero_() if old is None else held.copy_(old)
            self.started = False

    def forms(self, layout: Layout) -> list[tuple[Layout, Tensor, bool, float]]:
        """Group tensors: each with momentum float32 (s,), whether it is Nesterov's, and 1 - dampening."""
        settings = {entry.name: self._optimised.settings(entry.name) for entry in layout}
        forms: dict[tuple[bool, float], list[str]] = {}
        for name, group in settings.items():
            form = bool(group.get("nesterov")), 1 - float(group.get("dampening", 0.0))
            forms.setdefault(form, []).append(name)
        made = []
        for (nesterov, factor), names in forms.items():
            part = layout if len(forms) == 1 else layout.named(names)
            values = [float(settings[name]["momentum"]) for name in part.names]
            made.append((part, torch.tensor(values, dtype=torch.float32, device="cpu"), nesterov, factor))
        return made

    def discard(self) -> None:
        self.zero_()
        self._replaced.clear()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the velocity. One of zeros continues the optimiser's momentum."""
        super().load_state_dict(state)
        self.started = any(bool(state[f"{self.kind}/{entry.name}"].any()) for entry in self._layout)
        self._replaced.clear()


class Pending(Generic[T]):
    """Sent shares of the current step, by layout; `finish` subtracts each from the memory.

    A later bucket with Inf can still skip the step, so nothing is subtracted before the next one.
    """

    def __init__(self, finish: Callable[[T, Layout], None]) -> None:
        self._finish = finish
        self._step = -1
        self._shares: dict[int, tuple[T, Layout]] = {}

    def add(self, share: T, layout: Layout, step: int) -> None:
        self._step = step
        self._shares[id(layout)] = (share, layout)

    def drop(self, layout: Layout) -> None:
        self._shares.pop(id(layout), None)

    def clear(self) -> None:
        self._shares.clear()

    def finish_before(self, step: int) -> None:
        """Finish shares of earlier steps."""
        if self._step != step:
            self.finish_all()

    def finish_all(self) -> None:
        for share, layout in self._shares.values():
            self._finish(share, layout)
        self._shares.clear()


def copied(x: Tensor, layout: Layout) -> Tensor:
    """Return a copy of these tensors of float32 x (n,); other entries are undefined.

    In float32 (r + g) - g is not r, so undoing a step needs the old values.

    >>> copied(torch.ones(2), Layout.of([("a", (2,))]))
    tensor([1., 1.])
    """
    copy, runs = torch.empty_like(x), layout.segments.merged
    if runs.numel:
        torch._foreach_copy_(runs.views(copy), runs.views(x))
    return copy


def mark_overflow_(grad: Tensor, total: Tensor, layout: Layout) -> None:
    """Make these tensors of flat `grad` infinite where `total` is not finite, so that the error names them.

    >>> grad = torch.ones(2)
    >>> mark_overflow_(grad, torch.tensor([1.0, float("nan")]), Layout.of([("a", (2,))])); grad
    tensor([1., inf])
    """
    runs = layout.segments.merged
    for view, at in zip(runs.views(grad), runs.views(total), strict=True):
        view.masked_fill_(~at.isfinite(), math.inf)
