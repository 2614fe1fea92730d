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
    """One float32 an element; its momentum is the optimiser's, as that is set at each step."""

    def __init__(self, layout: Layout, optimised: Optimised) -> None:
        super().__init__("velocity", layout)
        self._optimised = optimised
        self._started = False

    def start(self) -> None:
        """Before the first step: go on with the momentum that the optimiser has gathered so far."""
        if self._started:
            return
        self._started = True
        for entry in self._layout:
            buffer = self._optimised.take_momentum(entry.name)
            if buffer is not None:
                settings = self._optimised.settings(entry.name)
                factor = float(settings["momentum"]) if settings["nesterov"] else 1.0
                self.set(entry, flat(buffer.detach().to(torch.float32)) * factor)

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
