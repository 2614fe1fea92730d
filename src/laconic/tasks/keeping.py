"""What backward keeps in a training: as it is, or as coded bytes (`laconic.activations`), and how much."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from laconic import activations
from laconic.activations.ledger import Ledger


class Keeping:
    """A rank's session of `laconic.activations`, or nothing where `spec` is None."""

    def __init__(self, model: nn.Module, spec: str | None, optimizer: torch.optim.Optimizer) -> None:
        self.session = None if spec is None else activations.compress(model, spec, optimizer)

    def open(self) -> AbstractContextManager[Any]:
        """Around all steps."""
        return nullcontext() if self.session is None else self.session

    def count(self) -> None:
        """Count what the next forward pass keeps."""
        if self.session is not None:
            self.session.ledger = Ledger()

    def counted(self) -> dict[str, int]:
        """Bytes kept since `count`, and what they would be as they are; empty without a session."""
        if self.session is None or self.session.ledger is None:
            return {}
        rows, self.session.ledger = self.session.ledger.rows.values(), None
        return {"kept": sum(kept for _, kept in rows), "kept_dense": sum(dense for dense, _ in rows)}

    def state_dict(self) -> dict[str, Any]:
        """What bounds follow from."""
        return {} if self.session is None else self.session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        if self.session is not None:
            self.session.load_state_dict(state)
