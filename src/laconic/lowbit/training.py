"""Base of transforms that produce a few-bit model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from laconic.transforms.transform import Option, Transform, TransformHandle


@dataclass(frozen=True)
class LowBitStats:
    """Statistics of low-bit training. `residual`: relative distance to the few-bit weights."""

    residual: float


class LowBitHandle(TransformHandle):
    """Handle of low-bit training of one model."""

    @abstractmethod
    def residual(self) -> float:
        """Return the weights' relative distance to their few-bit values."""

    @abstractmethod
    def quantised(self) -> AbstractContextManager[None]:
        """Return a context in which the model has its few-bit weights."""

    @abstractmethod
    def pack(self) -> nn.Module:
        """Return a copy of the model with packed weights."""

    def stats(self) -> LowBitStats:
        return LowBitStats(self.residual())

    def evaluating(self) -> AbstractContextManager[None]:
        return self.quantised()

    def figures(self) -> dict[str, Any]:
        return {"residual": self.residual()}

    def save_packed(self, path: Path) -> Mapping[str, Tensor]:
        packed = self.pack()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write_packed(packed, path)
        state: dict[str, Tensor] = packed.state_dict()
        return state

    def _write_packed(self, packed: nn.Module, path: Path) -> None:
        torch.save(packed.state_dict(), path)


class LowBitTraining(Transform):
    """Configuration of low-bit training."""

    option: ClassVar[Option] = "lowbit"
    replicas_equal: ClassVar[bool] = True
