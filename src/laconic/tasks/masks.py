"""Masks on a model's weights (`laconic.sparsity`) beside the loop: an event for each update of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from laconic.core.errors import AttachError
from laconic.core.spec import parse
from laconic.sparsity import SparseTraining, Sparsifier, sparsify
from laconic.tasks.companion import Companion
from laconic.tasks.settings import Event, TrainingSettings


class Masks(Companion):
    """`sparse`: the handle on this rank's model."""

    key: ClassVar[str] = "sparsity"

    def __init__(self, sparse: SparseTraining) -> None:
        self._sparse = sparse
        self._told = -1  # updates that events have told of; the first event tells of the first masks

    def events(self) -> list[Event]:
        """What is in use, where masks are new."""
        if self._sparse.updates == self._told:
            return []
        self._told = self._sparse.updates
        figures = self._sparse.stats()
        return [{"kind": "masks", "density": figures.density, "changed": figures.changed}]

    def state_dict(self) -> dict[str, Any]:
        """Masks, and where in their course they are."""
        return self._sparse.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the same masks."""
        self._sparse.load_state_dict(state)
        self._told = self._sparse.updates


def masks(settings: TrainingSettings, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Masks]:
    """The masks of the sparsifier of --sparsity, or none. Raises `AttachError`, naming it, if it fails."""
    if settings.sparsity is None or not isinstance(parse(settings.sparsity), Sparsifier):
        return []
    try:
        sparse = sparsify(model, optimizer, settings.sparsity, steps=settings.steps, seed=settings.seed)
    except AttachError as error:
        raise AttachError(f"--sparsity {settings.sparsity} does not work with this model: {error}") from error
    return [Masks(sparse)]
