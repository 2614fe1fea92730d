"""SWAT (`laconic.sparsity.swat`) beside the loop: layers compute with few weights and keep few inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from laconic.core.errors import AttachError
from laconic.core.spec import parse
from laconic.sparsity import Swat
from laconic.sparsity.swat import SwatTraining
from laconic.tasks.companion import Companion
from laconic.tasks.settings import Event, TrainingSettings


class SparseLayers(Companion):
    """`handle`: the one on this rank's model. Tests are sparse too, as the training is."""

    key: ClassVar[str] = "sparsity"

    def __init__(self, handle: Swat) -> None:
        self._handle = handle

    def told(self) -> Event:
        """Bytes of inputs that the sparse layers kept of the last batch, and what dense ones would keep."""
        return {"kept": self._handle.kept_bytes(), "kept_dense": self._handle.dense_bytes()}

    def state_dict(self) -> dict[str, Any]:
        """Thresholds, and when they are due."""
        return self._handle.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the same bits."""
        self._handle.load_state_dict(dict(state))


def sparse_layers(settings: TrainingSettings, model: nn.Module) -> list[SparseLayers]:
    """SWAT where --sparsity asks for it, or none. Made before the model is distributed."""
    if settings.sparsity is None or not isinstance(made := parse(settings.sparsity), SwatTraining):
        return []
    return [SparseLayers(swat_attached(made, model))]


def swat_attached(made: SwatTraining, model: nn.Module) -> Swat:
    """SWAT at work on this model. Raises `AttachError`, naming --sparsity, if it fails."""
    try:
        return made.attach(model)
    except AttachError as error:
        raise AttachError(f"--sparsity {made!r} does not work with this model: {error}") from error
