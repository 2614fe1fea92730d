"""A checkpoint counts only when every rank has written its part, and damage is named."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.shared import refuses

from laconic.core.errors import StateError
from laconic.tools.tasks import checkpoint


def state(rank: int, step: int) -> dict[str, Any]:
    return {"step": step, "residual": torch.arange(5.0) + 10 * rank + step}


def save_all(folder: Path, step: int, size: int = 3, keep: int = 2) -> Path:
    barrier = threading.Barrier(size)

    def one(rank: int) -> None:
        about = {"step": step, "rank": rank, "size": size, "keep": keep}
        try:
            checkpoint.save(folder, state(rank, step), **about, barrier=barrier.wait)  # type: ignore[arg-type]
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        assert [*threads.map(one, range(size))] == [None] * size
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


def test_damage_names_the_file_and_never_falls_back(tmp_path: Path) -> None:
    save_all(tmp_path, 3)
    place = save_all(tmp_path, 6)
    part, marker = place / "rank1.pt", place / checkpoint.MARKER
    raw, mark = part.read_bytes(), marker.read_text()
    half = len(raw) // 2

    def refused(file: Path) -> None:
        words = rf"{file.name}.*resume from step-000003"
        refuses(StateError, words, checkpoint.load, place, rank=1, size=3)

    for damaged in (raw[:half], raw[:half] + bytes([raw[half] ^ 1]) + raw[half + 1 :]):
        part.write_bytes(damaged)
        refused(part)
    part.unlink()
    refused(part)
    part.write_bytes(raw)
    for wrong in ('{"world_si', '{"world_size": "3"}'):
        marker.write_text(wrong)
        refused(marker)
    marker.write_text(mark)
    checkpoint.load(place, rank=1, size=3)


def test_another_world_size_is_refused(tmp_path: Path) -> None:
    place = save_all(tmp_path, 3, size=2)
    words = r"written by 2 ranks, this run has 4.*laconic\.resize"
    refuses(StateError, words, checkpoint.load, place, rank=0, size=4)
    assert checkpoint.latest(tmp_path / "nowhere") is None
    alone = {"step": 1, "rank": 0, "size": 2, "barrier": lambda: None}
    refuses(
        StateError, r"rank1\.pt is missing.*share", checkpoint.save, tmp_path / "new", state(0, 1), **alone
    )
    assert checkpoint.latest(tmp_path / "new") is None


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for step in (1, 20, 300):
        save_all(tmp_path, step, size=2)
    assert [checkpoint.step_of(place) for place in checkpoint.complete(tmp_path)] == [20, 300]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000020", "step-000300"]


def test_damage_names_an_older_checkpoint_to_resume_from(tmp_path: Path) -> None:
    places = [save_all(tmp_path, step) for step in (1, 2)]
    for place, says in zip(places[::-1], ["to resume from step-000001", "to start again"], strict=True):
        (place / "rank0.pt").write_bytes(b"damaged")
        with pytest.raises(StateError, match=f"remove {place} {says}"):
            checkpoint.load(place, rank=0, size=3)
