"""Checks for gradients that are changed or dropped between the exchange and the step.

Clipping `p.grad` would clip local momentum; a GradScaler unknown to `compress` changes the scale of
residuals.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from laconic.core.layout import Entry, Layout
from laconic.core.warning import warn

TOLERANCE = 0.02  # relative, above the rounding error of bfloat16
LOOKS = 16  # tensors checked for a scaler
LEAST_POWER = 7  # scalers divide by at least 2^7; gradient accumulation, by less


@dataclass(frozen=True)
class Noted:
    magnitude: Tensor
    scale: float
    velocity: bool


class GradientWatch:
    """Comparison of one mean per bucket after the exchange and before the step; warns once.

    A GPU's magnitudes are read in the next exchange. `release`: leaves momentum to the optimiser.
    """

    def __init__(self, release: Callable[[str, str | None, float], None]) -> None:
        self._release = release
        self._seen: dict[str, Noted] = {}
        self._unread: list[tuple[str, Noted, Tensor, float]] = []
        self._read: list[tuple[str, bool, float, float]] = []
        self._known: dict[tuple[int, frozenset[str] | None], tuple[Layout, Entry | None]] = {}
        self._looks = LOOKS
        self._warned = False

    def note(self, mean: Tensor, layout: Layout, owned: Iterable[str], scale: float, remembers: bool) -> None:
        """Store the magnitude of the smallest `owned` tensor of this bucket.

        If the method `remembers`, the first steps also check others, for a scaler.
        """
        if self._warned:
            return
        if self._unread:
            self._read_all()
        owned = frozenset(owned)
        smallest = self._smallest(layout, owned) if owned else None
        if smallest is None and remembers and self._looks > 0:
            smallest = self._smallest(layout, None)
        if smallest is not None:
            view = mean[smallest.offset : smallest.offset + smallest.numel]
            self._seen[smallest.name] = Noted(magnitude(view), scale, smallest.name in owned)

    def _smallest(self, layout: Layout, names: frozenset[str] | None) -> Entry | None:
        key = id(layout), names
        known = self._known.get(key)
        if known is None:
            entries = [each for each in layout if names is None or each.name in names]
            smallest = min(entries, key=lambda entry: entry.numel, default=None)
            known = self._known[key] = layout, smallest
        return known[1]

    def noted(self) -> tuple[str, ...]:
        return tuple(self._seen)

    def compare(self, name: str, grad: Tensor, scale: float) -> None:
        """Warn if the gradient, divided by `scale`, changed since the exchange."""
        for earlier in self._read:
            self._judge(*earlier)
        self._read.clear()
        noted = self._seen.pop(name, None)
        if self._warned or noted is None:
            return
        found = magnitude(grad)
        if grad.is_cpu:
            expected = float(noted.magnitude) / noted.scale
            self._judge(name, noted.velocity, expected, float(found) / scale)
        else:
            self._unread.append((name, noted, found, scale))

    def _read_all(self) -> None:
        each = [number for _, noted, found, _ in self._unread for number in (noted.magnitude, found)]
        read = iter(torch.stack(each).tolist())
        for (name, noted, _, scale), before, now in zip(self._unread, read, read, strict=True):
            self._read.append((name, noted.velocity, before / noted.scale, now / scale))
        self._unread.clear()

    def _judge(self, name: str, velocity: bool, expected: float, found: float) -> None:
        if self._warned or not expected:
            return
        self._looks -= not velocity
        kept = min(1.0, found / expected)  # later steps must not apply what clipping has removed
        if (power := _power_of_two(expected, found)) >= LEAST_POWER:
            reason = (
                f"the gradient of {name} was divided by {2**power} between backward() and step(), as by a"
                " GradScaler"
            )
            self._warn(
                f"{reason}. This method is to know it, so that it exchanges unscaled gradients and holds"
                " nothing back at a wrong scale: pass it, laconic.compress(..., scaler=scaler)"
            )
            if velocity:
                self._release(reason, None, kept)
        elif velocity and abs(found - expected) > TOLERANCE * max(found, expected):
            self._release(
                f"the gradient of {name} was changed between backward() and step() (its sum of magnitudes was"
                f" {expected:.4g}, it is {found:.4g}), and it holds velocity",
                "to clip gradients use clip= of the method",
                kept,
            )

    def _warn(self, text: str) -> None:
        self._warned = True
        warn(text)


class LostGradientCheck:
    """Warning about gradients that were exchanged, then dropped by zero_grad() without a step.

    Their unsent share is sent later. Checks before the next gradient: only then do dropped gradients differ
    from accumulated ones.
    """

    def __init__(self, parameters: Iterable[Tensor], method: str) -> None:
        self.pending = False
        self.warned = False
        self._unstepped = False
        self._method = method
        self._parameters = [*parameters]
        known = weakref.ref(self)  # a hook must not keep this object alive

        def before_adding(grad: Tensor) -> None:
            watch = known()
            if watch is not None and watch.pending:
                watch._look()

        self._hooks: list[RemovableHandle] = [
            parameter.register_hook(before_adding)  # type: ignore[no-untyped-call]
            for parameter in self._parameters
        ]

    def take_unstepped(self) -> bool:
        found, self._unstepped = self._unstepped, False
        return found

    def _look(self) -> None:
        self.pending, self._unstepped = False, True
        gradients = (parameter.grad for parameter in self._parameters)
        if self.warned or any(grad is not None and bool(grad.any()) for grad in gradients):
            return
        self.warned = True
        warn(
            "gradients were exchanged and then thrown away by zero_grad(), without optimizer.step():"
            f" {self._method} holds back what it has not sent of them, and that comes back with later"
            " gradients. Run a backward pass whose gradients are not used under model.no_sync(), or call"
            " handle.discard() where a step is skipped"
        )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def magnitude(x: Tensor) -> Tensor:
    reals = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    total: Tensor = torch.linalg.vector_norm(reals, 1, dtype=torch.promote_types(reals.dtype, torch.float32))
    return total.to(torch.float32)


def _power_of_two(before: float, after: float) -> int:
    """Return the k > 0 with before = 2^k after, else 0.

    >>> _power_of_two(512.0, 2.0), _power_of_two(512.0, 3.0), _power_of_two(1.0, 1.0), _power_of_two(1.0, 0.0)
    (8, 0, 0, 0)
    """
    if not (0 < after < before < math.inf):
        return 0
    power = round(math.log2(before / after))
    return power if math.isclose(before, after * 2.0**power, rel_tol=1e-4) else 0
