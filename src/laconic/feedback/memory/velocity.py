"""The velocity of SGD's momentum, kept before the exchange: it continues the optimiser's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.core.layout import Layout
from laconic.core.memory_order import flat
from laconic.feedback import Optimised
from laconic.feedback.memory import Memory


class Velocity(Memory):
    """One float32 per element; the momentum factor is the optimiser's current setting."""

    def __init__(self, layout: Layout, optimised: Optimised) -> None:
        super().__init__("velocity", layout)
        self._optimised = optimised
        self._started = False
        self._began = -1  # the first step
        self._replaced: dict[str, Tensor | None] = {}  # values before the first step

    def start(self, step: int) -> None:
        """Before the first step: continue the momentum that the optimiser has gathered so far."""
        if self._started:
            if step != self._began:
                self._replaced.clear()
            return
        self._started, self._began = True, step
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
        """Undo `start` if the skipped step was the first."""
        for name, old in self._replaced.items():
            held = self.tensor(name)
            assert held is not None
            held.zero_() if old is None else held.copy_(old)
            self._started = False

    def forms(self, layout: Layout) -> list[tuple[Layout, Tensor, bool, float]]:
        """Groups of these tensors by the form of their momentum.

        Each has its tensors, the momentum of each, float32 (s,), whether it is Nesterov's, and the factor of
        the gradient, 1 - dampening.
        """
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
        """All zero again; what the optimiser has gathered is not taken any more."""
        self.zero_()
        self._replaced.clear()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the velocity. One of zeros has not begun: it continues the optimiser's momentum."""
        super().load_state_dict(state)
        self._started = any(bool(state[f"{self.kind}/{entry.name}"].any()) for entry in self._layout)
        self._replaced.clear()
