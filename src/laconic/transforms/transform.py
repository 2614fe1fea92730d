"""Protocol of the transforms: low-bit layers, tables, masks, sparse layers and coded activations.

A `Transform` is the configuration, parsed from a spec such as "rigl(density=0.1)". `attach` returns the
`TransformHandle`, which owns the state:

    transform = parse("rigl(density=0.1)")
    handle = transform.attach(model, optimizer, Run(steps=1000))
    with handle.training():
        for batch in loader:
            handle.before_step(evaluated=False)
            ...                                      forward, backward, optimizer.step()
    handle.finish()                                  the final model, to evaluate and deploy

A new transform is a subclass of `Transform` in a file of its name in `lowbit`, `sparsity` or `activations`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.core.spec import Spec

Option = Literal["lowbit", "sparsity", "activations"]


@dataclass(frozen=True)
class Run:
    """Facts about a training.

    Attributes:
        steps: Steps of the whole training.
        seed: Seed that all ranks share.
        scaled: Whether a GradScaler scales the loss.
    """

    steps: int = 1
    seed: int = 0
    scaled: bool = False


DEFAULT_RUN = Run()


@dataclass(frozen=True)
class StoredInputs:
    """Bytes that layers store for backward, compressed (`kept`) and dense."""

    kept: int
    kept_dense: int


class TransformHandle(ABC):
    """Transform attached to one model: `model`, transformed."""

    model: nn.Module

    @abstractmethod
    def stats(self) -> Any:
        """Return this rank's statistics, a frozen dataclass."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state, without those of model and optimiser."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, after those of model and optimiser."""

    @abstractmethod
    def remove(self) -> None:
        """Detach from the model and the optimiser. A second call does nothing."""

    def finish(self) -> nn.Module:
        """Return the final model, to evaluate and deploy."""
        return self.model

    def save_packed(self, path: Path) -> Mapping[str, Tensor] | None:
        """Write the model in its small form; return its tensors."""
        return None

    def training(self) -> AbstractContextManager[Any]:
        """Return the context of all training steps."""
        return nullcontext()

    def before_step(self, *, evaluated: bool) -> None:  # noqa: B027  # most do nothing
        """Prepare a step. `evaluated`: whether the model is evaluated after it."""

    def events(self) -> list[dict[str, Any]]:
        """Return the events to log after a step, on rank 0."""
        return []

    def evaluating(self) -> AbstractContextManager[Any]:
        """Return the context of an evaluation."""
        return nullcontext()

    def figures(self) -> dict[str, Any]:
        """Return the numbers to log after each evaluation. Called once by every rank."""
        return {}


class Transform(Spec):
    """Configuration of a transform: a frozen dataclass.

    Attributes:
        option: Its option of `laconic train`.
        replicas_equal: Whether replicas must be equal after every step.
        after_distribute: Whether to attach after the model is distributed.
    """

    option: ClassVar[Option]
    replicas_equal: ClassVar[bool] = False
    after_distribute: ClassVar[bool] = False

    @abstractmethod
    def attach(
        self, model: nn.Module, optimizer: Optimizer | None = None, run: Run = DEFAULT_RUN
    ) -> TransformHandle:
        """Attach to a model and its optimiser; some transforms need only the model.

        Raises `AttachError`, with nothing changed, if either does not fit.
        """
