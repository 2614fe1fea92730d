"""A low-bit training (`laconic.lowbit`) beside the loop: tests in few bits, a packed model at the end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from laconic.core.errors import AttachError, SpecError
from laconic.core.spec import parse
from laconic.lowbit import FewBitHandle, save_packed
from laconic.lowbit.training import LowBitHandle as Trained
from laconic.lowbit.training import LowBitTraining
from laconic.tasks.companion import Companion
from laconic.tasks.settings import Event, TrainingSettings

PACKED = "packed.pt"  # in the training's folder, for `lowbit.load_packed`; with a table, `load_tables`


class FewBits(Companion):
    """`trained`: the handle on this rank's model."""

    key: ClassVar[str] = "lowbit"

    def __init__(self, model: nn.Module, trained: Trained) -> None:
        self._model, self._trained = model, trained

    def testing(self) -> AbstractContextManager[None]:
        """Inside, the model has its few bits."""
        return self._trained.quantised()

    def told(self) -> Event:
        """The distance from few bits, and of signs that always are, how many have changed since a test."""
        flips = {"flips": self._trained.flips()} if isinstance(self._trained, FewBitHandle) else {}
        return {"residual": self._trained.residual()} | flips

    def finish(self, folder: Path, rank: int) -> list[Event]:
        """Give the model its few bits for good; rank 0 also writes it packed, and says how large that is."""
        self._trained.finish()
        if rank:
            return []
        return [{"kind": "decision", "message": leave_packed(folder, self._model, self._trained)}]

    def state_dict(self) -> dict[str, Any]:
        """The handle's."""
        return self._trained.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the same bits."""
        self._trained.load_state_dict(state)


def few_bits(settings: TrainingSettings, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[FewBits]:
    """The training of --lowbit, or none. Made before the model is distributed."""
    if settings.lowbit is None:
        return []
    return [FewBits(model, lowbit_attached(settings.lowbit, model, optimizer))]


def lowbit_attached(text: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
    """The low-bit training of this spec, at work. Raises `SpecError` or `AttachError`, naming --lowbit."""
    training = parse(text)
    if not isinstance(training, LowBitTraining):
        raise SpecError(f"--lowbit takes a low-bit training such as admm(table='ternary'), got {training!r}")
    try:
        return training.attach(model, optimizer)
    except AttachError as error:
        raise AttachError(f"--lowbit {text} does not work with this model: {error}") from error


def leave_packed(folder: Path, model: nn.Module, lowbit: Trained) -> str:
    """Write the packed model, and say how large its tensors are."""
    folder.mkdir(parents=True, exist_ok=True)
    packed = lowbit.pack()
    state, dense = packed.state_dict(), model.state_dict()
    if isinstance(lowbit, FewBitHandle):
        save_packed(packed, folder / PACKED)
    else:
        torch.save(state, folder / PACKED)
    small, large = (sum(each.numel() * each.element_size() for each in d.values()) for d in (state, dense))
    return f"packed: {small:,} bytes, {large / small:.1f} times smaller, in {folder / PACKED}"
