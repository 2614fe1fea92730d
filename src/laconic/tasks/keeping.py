"""What backward keeps in a training, as coded bytes (`laconic.activations`), and how much it is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

from laconic import activations
from laconic.activations.ledger import Ledger
from laconic.tasks.companion import Companion
from laconic.tasks.settings import Event, TrainingSettings


class Keeping(Companion):
    """A rank's session of `laconic.activations`."""

    key: ClassVar[str] = "keeping"

    def __init__(self, model: nn.Module, spec: str, optimizer: torch.optim.Optimizer | None) -> None:
        self.session = activations.compress(model, spec, optimizer)

    def open(self) -> AbstractContextManager[Any]:
        """The session."""
        return self.session

    def before_step(self, *, tested: bool) -> None:
        """Count what the forward pass before a test keeps."""
        if tested:
            self.session.ledger = Ledger()

    def told(self) -> Event:
        """Bytes kept since `before_step`, and what they would be as they are.

        Empty where the step was not to be tested, but a loss has made ranks go on from a later one.
        """
        ledger, self.session.ledger = self.session.ledger, None
        if ledger is None:
            return {}
        rows = ledger.rows.values()
        return {"kept": sum(kept for _, kept in rows), "kept_dense": sum(dense for dense, _ in rows)}

    def state_dict(self) -> dict[str, Any]:
        """What bounds follow from."""
        return self.session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the same bounds."""
        self.session.load_state_dict(state)


def kept_in_code(
    settings: TrainingSettings, model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[Keeping]:
    """The session of --activations, or none. Bounds of the optimiser do not hold for scaled losses."""
    scaled = settings.precision == "fp16"
    spec = settings.activations
    return [] if spec is None else [Keeping(model, spec, None if scaled else optimizer)]
