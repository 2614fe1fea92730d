"""The velocity of SGD's momentum, kept before the exchange: it goes on where the optimiser's own was."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.core.errors import SpecError
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
        self._replaced: dict[str, tuple[Tensor, Tensor | None]] = {}  # buffers that it took, and old values

    def start(self, step: int) -> None:
        """Before the first step: go on with the momentum that the optimiser has gathered so far."""
        if self._started:
            if step != self._began:
                self._replaced.clear()
            return
        self._started, self._began = True, step
        self._replaced.clear()
        for entry in self._layout:
            buffer = self._optimised.take_momentum(entry.name)
            if buffer is not None:
                old = self.tensor(entry.name)
                self._replaced[entry.name] = buffer, None if old is None else old.clone()
                settings = self._optimised.settings(entry.name)
                factor = float(settings["momentum"]) if settings["nesterov"] else 1.0
                self.set(entry, flat(buffer.detach().to(torch.float32)) * factor)

    def put_back(self) -> None:
        """Give the optimiser its momentum back if the skipped step was the first."""
        for name, (buffer, old) in self._replaced.items():
            held = self.tensor(name)
            assert held is not None
            held.zero_() if old is None else held.copy_(old)
            self._optimised.give_momentum(name, buffer)
            self._started = False

    def momentum(self, layout: Layout) -> tuple[Tensor, bool]:
        """The momentum of each of these tensors, float32 (s,), and whether it is Nesterov's."""
        settings = [self._optimised.settings(entry.name) for entry in layout]
        nesterov = {bool(group["nesterov"]) for group in settings}
        if len(nesterov) > 1:
            raise SpecError("momentum before the exchange: all parameter groups nesterov=True, or none")
        momentum = torch.tensor(
            [float(group["momentum"]) for group in settings], dtype=torch.float32, device="cpu"
        )
        return momentum, nesterov == {True}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the velocity back; what the optimiser has gathered then goes before it."""
        super().load_state_dict(state)
        self._started = False
        self._replaced.clear()
