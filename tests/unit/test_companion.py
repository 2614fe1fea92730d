"""What trains along with a model takes part in its loop at the moments that it names, and in no other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from laconic.tasks.companion import Companion, Companions


class Quiet(Companion):
    """Only what must be there: a state."""

    key = "quiet"

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class Talking(Quiet):
    """Notes when a test begins and ends, and tells of everything."""

    key = "talking"

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    @contextmanager
    def testing(self) -> Iterator[None]:
        self.noted.append("begins")
        try:
            yield
        finally:
            self.noted.append("ends")

    def before_step(self, *, tested: bool) -> None:
        self.steps += 1

    def events(self) -> list[dict[str, Any]]:
        return [{"kind": "talk"}]

    def told(self) -> dict[str, Any]:
        return {"talked": self.steps}

    def finish(self, folder: Path, rank: int) -> list[dict[str, Any]]:
        return [] if rank else [{"kind": "decision", "message": str(folder)}]


def test_without_companions_nothing_is_told_and_a_checkpoint_has_no_key_more() -> None:
    none = Companions()
    with none.open(), none.testing():
        none.before_step(tested=True)
    assert none.events() == [] and none.told() == {} and none.finish(Path("folder"), 0) == []
    assert none.state_dict() == {}
    none.load_state_dict({"settings": {}})


def test_each_takes_part_at_its_moments() -> None:
    talking = Talking()
    both = Companions(Quiet(), talking)
    with both.open():
        both.before_step(tested=True)
        with pytest.raises(RuntimeError, match="of the test"), both.testing():
            assert talking.noted == ["begins"]
            raise RuntimeError("of the test")
    assert talking.noted == ["begins", "ends"]
    assert both.events() == [{"kind": "talk"}] and both.told() == {"talked": 1}
    assert both.finish(Path("folder"), 0) == [{"kind": "decision", "message": "folder"}]
    assert both.finish(Path("folder"), 1) == []


def test_a_checkpoint_has_one_key_a_companion() -> None:
    one, other = Companions(Quiet(), Talking()), Companions(Talking(), Quiet())
    one.before_step(tested=False)
    assert one.state_dict() == {"quiet": {"steps": 0}, "talking": {"steps": 1}}
    other.load_state_dict({"model": {}} | one.state_dict())
    assert other.state_dict() == one.state_dict()
