"""The training loop calls a transform at each moment that its handle implements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from laconic.tools.cli import fits
from laconic.tools.tasks.catalogue import TASKS
from laconic.tools.tasks.large_batch import LargeBatch
from laconic.tools.tasks.transforms import Transforms
from laconic.transforms.transform import TransformHandle


class Quiet(TransformHandle):
    """Only the required methods."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.steps = 0

    def stats(self) -> int:
        return self.steps

    def remove(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class Talking(Quiet):
    """Notes when an evaluation begins and ends, and logs at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        self.noted.append("begins")
        try:
            yield
        finally:
            self.noted.append("ends")

    def before_step(self, *, evaluated: bool) -> None:
        self.steps += 1

    def events(self) -> list[dict[str, Any]]:
        return [{"kind": "talk"}]

    def figures(self) -> dict[str, Any]:
        return {"talked": self.steps}

    def save_packed(self, path: Path) -> dict[str, torch.Tensor]:
        return {"codes": torch.zeros(6, dtype=torch.uint8)}


def test_without_transforms_nothing_is_logged_and_a_checkpoint_has_no_key_more() -> None:
    none = Transforms({})
    with none.training(), none.evaluating():
        none.before_step(evaluated=True)
    assert none.events() == [] and none.figures() == {} and none.finish(Path("folder"), 0) == []
    assert none.state_dict() == {}
    none.load_state_dict({"settings": {}})


def test_each_takes_part_at_its_moments() -> None:
    talking = Talking()
    both = Transforms({"quiet": Quiet(), "talking": talking})
    with both.training():
        both.before_step(evaluated=True)
        with pytest.raises(RuntimeError, match="of the test"), both.evaluating():
            assert talking.noted == ["begins"]
            raise RuntimeError("of the test")
    assert talking.noted == ["begins", "ends"]
    assert both.events() == [{"kind": "talk"}] and both.figures() == {"talked": 1}
    message = f"packed: 6 bytes, 4.0 times smaller, in {Path('folder', 'packed.pt')}"
    assert both.finish(Path("folder"), 0) == [{"kind": "decision", "message": message}]
    assert both.finish(Path("folder"), 1) == []


def test_a_checkpoint_has_one_key_a_transform() -> None:
    one = Transforms({"quiet": Quiet(), "talking": Talking()})
    other = Transforms({"talking": Talking(), "quiet": Quiet()})
    one.before_step(evaluated=False)
    assert one.state_dict() == {"quiet": {"steps": 0}, "talking": {"steps": 1}}
    other.load_state_dict({"model": {}} | one.state_dict())
    assert other.state_dict() == one.state_dict()


def test_transforms_are_checked_with_the_optimiser_of_each_method(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[type] = []

    def attached(
        option: str, text: str, model: nn.Module, optimizer: torch.optim.Optimizer, run: Any
    ) -> Quiet:
        tried.append(type(optimizer))
        return Quiet()

    monkeypatch.setattr(fits, "attached", attached)
    specs = ["dense()", "onebit_adam()", "cgx()", "qcmd_adagrad()"]
    fits.check_transforms({"lowbit": "admm()"}, specs, None, TASKS["digits"].recipe(), LargeBatch(), 10)
    assert [each.__name__ for each in tried] == ["SGD", "AdamW", "QCMDAdaGrad"]
