"""What trains along with a model: a companion has hooks at the moments of a rank's training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

from laconic.tasks.settings import Event


class Companion(ABC):
    """Something attached to a model or its optimiser. `key`: of its part of a checkpoint."""

    key: ClassVar[str]

    def open(self) -> AbstractContextManager[Any]:
        """Around all steps."""
        return nullcontext()

    def before_step(self, *, tested: bool) -> None:  # noqa: B027  # most do nothing
        """Before a step's forward pass. `tested`: the model is tested after the step."""

    def events(self) -> list[Event]:
        """What rank 0 emits after a step. Called on rank 0 alone."""
        return []

    def testing(self) -> AbstractContextManager[Any]:
        """Around a test."""
        return nullcontext()

    def told(self) -> Event:
        """What the event of a test says of it. Called once after each test, on every rank."""
        return {}

    def finish(self, folder: Path, rank: int) -> list[Event]:
        """The end, on every rank: what is left to do to the model, and to emit. Rank 0 may write files."""
        return []

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the model and the optimiser."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, after model and optimiser have loaded theirs."""


class Companions:
    """All companions of one training on one rank; often none."""

    def __init__(self, *each: Companion) -> None:
        self._all = each

    @contextmanager
    def open(self) -> Iterator[None]:
        """Around all steps."""
        with ExitStack() as stack:
            for companion in self._all:
                stack.enter_context(companion.open())
            yield

    def before_step(self, *, tested: bool) -> None:
        """Before a step's forward pass."""
        for companion in self._all:
            companion.before_step(tested=tested)

    def events(self) -> list[Event]:
        """What rank 0 emits after a step."""
        return [event for companion in self._all for event in companion.events()]

    @contextmanager
    def testing(self) -> Iterator[None]:
        """Around a test."""
        with ExitStack() as stack:
            for companion in self._all:
                stack.enter_context(companion.testing())
            yield

    def told(self) -> Event:
        """What the event of a test says of them."""
        return {name: figure for companion in self._all for name, figure in companion.told().items()}

    def finish(self, folder: Path, rank: int) -> list[Event]:
        """The end, on every rank."""
        return [event for companion in self._all for event in companion.finish(folder, rank)]

    def state_dict(self) -> dict[str, Any]:
        """Each one's state, by its key."""
        return {companion.key: companion.state_dict() for companion in self._all}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint that has each one's state, by its key."""
        for companion in self._all:
            companion.load_state_dict(state[companion.key])
