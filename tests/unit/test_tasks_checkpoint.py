"""A checkpoint counts only when every rank has written its part, and damage is named."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.core.errors import StateError
from laconic.tasks import checkpoint


def state(rank: int, step: int) -> dict[str, Any]:
    return {"step": step, "residual": torch.arange(5.0) + 10 * rank + step}


def save_all(folder: Path, step: int, size: int = 3, keep: int = 2) -> Path:
    barrier = threading.Barrier(size)
    failures: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            checkpoint.save(
                folder, state(rank, step), step=step, rank=rank, size=size, barrier=barrier.wait, keep=keep
            )
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    return folder / f"step-{step:06d}"


def test_each_rank_gets_its_own_part_back(tmp_path: Path) -> None:
    place = save_all(tmp_path, 7)
    assert checkpoint.latest(tmp_path) == place
    assert checkpoint.step_of(place) == 7
    for rank in range(3):
        loaded = checkpoint.load(place, rank=rank, size=3)
        assert torch.equal(loaded["residual"], state(rank, 7)["residual"])
    assert not list(tmp_path.rglob(".*")), "temporary files are left"


def test_an_incomplete_checkpoint_does_not_count(tmp_path: Path) -> None:
    whole = save_all(tmp_path, 5)
    started = tmp_path / "step-000009"
    started.mkdir()
    torch.save(state(0, 9), started / "rank0.pt")  # rank 1 was killed before it wrote
    assert checkpoint.latest(tmp_path) == whole
    with pytest.raises(StateError, match=r"step-000009 is not complete.*resume from step-000005"):
        checkpoint.load(started, rank=0, size=3)


def test_no_folder_holds_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("harm", ["cut", "flip", "remove", "marker", "other marker"])
def test_damage_names_the_file_and_never_falls_back(harm: str, tmp_path: Path) -> None:
    save_all(tmp_path, 3)
    place = save_all(tmp_path, 6)
    part = place / "rank1.pt"
    raw = bytearray(part.read_bytes())
    if harm == "cut":
        part.write_bytes(raw[: len(raw) // 2])
    elif harm == "flip":
        raw[len(raw) // 2] ^= 1
        part.write_bytes(raw)
    elif harm == "remove":
        part.unlink()
    elif harm == "marker":
        (place / checkpoint.MARKER).write_text('{"world_si')
    else:
        (place / checkpoint.MARKER).write_text('{"world_size": "3"}')
    named = checkpoint.MARKER if "marker" in harm else "rank1.pt"
    with pytest.raises(StateError, match=rf"{named}.*resume from step-000003"):
        checkpoint.load(place, rank=1, size=3)


def test_another_world_size_is_refused(tmp_path: Path) -> None:
    place = save_all(tmp_path, 3, size=2)
    with pytest.raises(StateError, match=r"written by 2 ranks, this run has 4.*laconic\.resize"):
        checkpoint.load(place, rank=0, size=4)


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for step in (1, 20, 300):
        save_all(tmp_path, step, size=2)
    assert [checkpoint.step_of(place) for place in checkpoint.complete(tmp_path)] == [20, 300]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000020", "step-000300"]


def test_a_part_that_rank_0_cannot_see_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"rank1\.pt is missing.*share"):
        checkpoint.save(tmp_path, state(0, 1), step=1, rank=0, size=2, barrier=lambda: None)
    assert checkpoint.latest(tmp_path) is None
