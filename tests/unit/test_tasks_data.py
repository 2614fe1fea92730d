"""Data sets: every file format gives the same tensors, and what is missing or damaged is named."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.unit.shared import for_each, refuses

from laconic.core.errors import DataError, SpecError
from laconic.tools.tasks import TASKS, find
from laconic.tools.tasks.cifar10 import crop_and_flip
from laconic.tools.tasks.loading import mapped, prepare
from laconic.tools.tasks.source import VARIABLE
from laconic.tools.tasks.task import PARTS

SIZES = {"train": 10, "test": 4}


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def mnist_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"{kind}_{part}": rng.integers(
            0, 10 if kind == "y" else 256, (n, 28, 28)[: 1 if kind == "y" else 3], np.uint8
        )
        for part, n in SIZES.items()
        for kind in "xy"
    }


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, arrays: dict[str, np.ndarray], packed: bool) -> None:
    names = {"x_train": "train-images-idx3", "y_train": "train-labels-idx1"}
    names |= {"x_test": "t10k-images-idx3", "y_test": "t10k-labels-idx1"}
    for array, name in names.items():
        raw = idx(arrays[array])
        path = folder / f"{name}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(raw) if packed else raw)


@for_each("form", ["npz", "idx", "idx.gz"])
def test_mnist_reads_each_of_its_formats(form: str, tmp_path: Path) -> None:
    arrays, folder = mnist_arrays(), tmp_path / form
    folder.mkdir()
    if form == "npz":
        np.savez(folder / "mnist.npz", **arrays)
    else:
        write_idx(folder, arrays, packed=form.endswith("gz"))
    tensors = find("mnist").load(folder)
    assert torch.equal(tensors["train_x"], torch.from_numpy(arrays["x_train"])[:, None])
    assert torch.equal(tensors["test_y"], torch.from_numpy(arrays["y_test"]))


def cifar_batches() -> list[tuple[np.ndarray, list[int]]]:
    rng = np.random.default_rng(1)
    return [(rng.integers(0, 256, (2, 3072), np.uint8), rng.integers(0, 10, 2).tolist()) for _ in range(6)]


def write_cifar(folder: Path, batches: list[tuple[np.ndarray, list[int]]], form: str) -> None:
    inside = folder / f"cifar-10-batches-{form}"
    inside.mkdir(parents=True)
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for name, (images, labels) in zip(names, batches, strict=True):
        if form == "py":
            batch = {b"data": images, b"labels": labels, b"batch_label": name.encode()}
            (inside / name).write_bytes(pickle.dumps(batch | {b"filenames": [b"a.png"] * 2}, protocol=2))
        else:
            records = np.concatenate([np.array(labels, np.uint8)[:, None], images], axis=1)
            (inside / f"{name}.bin").write_bytes(records.tobytes())


@for_each("form", ["py", "bin"])
def test_cifar10_reads_pickled_and_binary_batches(form: str, tmp_path: Path) -> None:
    batches, outer = cifar_batches(), tmp_path / form
    write_cifar(outer, batches, form)
    expected = np.concatenate([images for images, _ in batches[:5]]).reshape(-1, 3, 32, 32)
    for folder in (outer, outer / f"cifar-10-batches-{form}"):
        tensors = find("cifar10").load(folder)
        assert torch.equal(tensors["train_x"], torch.from_numpy(expected))
        assert tensors["test_y"].tolist() == batches[5][1]


def test_cifar10_reads_joined_jpegs(tmp_path: Path) -> None:
    colours = [(200, 30, 40), (10, 220, 60), (0, 0, 250)]
    files = []
    for colour in colours:
        buffer = io.BytesIO()
        Image.new("RGB", (32, 32), colour).save(buffer, "JPEG", quality=95)
        files.append(np.frombuffer(buffer.getvalue(), np.uint8))
    offsets = np.cumsum([0, *(len(file) for file in files)])
    parts = {"jpeg": np.concatenate(files), "offsets": offsets, "labels": np.arange(3, dtype=np.uint8)}
    np.savez(
        tmp_path / "cifar10_jpeg.npz", **{f"{s}_{k}": v for s in ("train", "test") for k, v in parts.items()}
    )
    tensors = find("cifar10").load(tmp_path)
    found = tensors["train_x"].float().mean(dim=(2, 3))
    assert torch.allclose(found, torch.tensor(colours, dtype=torch.float32), atol=3)  # JPEG rounds colours


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was-here",)


def test_a_pickle_that_is_no_batch_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_cifar(tmp_path, cifar_batches(), "py")
    bad = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    for content in (Evil(), {b"data": Evil(), b"labels": [1]}, {b"labels": [1]}, [1, 2]):
        bad.write_bytes(pickle.dumps(content))
        refuses(DataError, "data_batch_3", find("cifar10").load, tmp_path)
        assert not Path("was-here").exists()


@for_each("name", ["mnist", "cifar10", "shakespeare"])
def test_missing_or_damaged_data_names_file_folder_variable_and_source(name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    with pytest.raises(DataError) as nowhere:
        task.load(None)
    with pytest.raises(DataError) as empty:
        task.load(tmp_path)
    assert all(word in str(nowhere.value) for word in (task.files[0], VARIABLE, "--data", "https://"))
    assert all(word in str(empty.value) for word in (task.files[0], str(tmp_path), VARIABLE, "https://"))
    refuses(DataError, "no data folder", task.load, tmp_path / "nowhere")
    path = tmp_path / name / task.files[0]
    path.parent.mkdir()
    for content in (b"", b"PK\x03\x04 cut short", b"\x93NUMPY junk"):
        path.write_bytes(content)
        refuses(DataError, path.name, task.load, path.parent)


def test_the_variable_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "input.txt").write_text("to be or not to be, " * 200)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    tensors = find("shakespeare").load(None)
    x, y = tensors["train_x"], tensors["train_y"]
    assert bytes(x[0, :5].tolist()) == b"to be"
    assert torch.equal(x.flatten()[1:], y.flatten()[:-1])  # what follows each letter


def test_workers_map_what_the_launcher_read(tmp_path: Path) -> None:
    tensors = prepare(find("digits"), None, tmp_path / "scratch" / "data.pt")
    again = mapped(tmp_path / "scratch" / "data.pt")
    assert set(again) == set(PARTS)
    assert all(torch.equal(tensors[part], again[part]) for part in PARTS)


def test_crops_are_windows_of_the_padded_image() -> None:
    x = torch.randint(1, 256, (64, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = crop_and_flip(x, torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4))
    mirrored = 0
    for image, cropped in zip(padded, found, strict=True):
        windows = [image[:, top : top + 32, left : left + 32] for top in range(9) for left in range(9)]
        plain = any(torch.equal(window, cropped) for window in windows)
        flipped = any(torch.equal(window.flip(2), cropped) for window in windows)
        assert plain or flipped
        mirrored += flipped
    assert 16 < mirrored < 48  # 64 fair coins: beyond 4 sigma otherwise
    assert torch.equal(found, crop_and_flip(x, torch.Generator().manual_seed(1)))


def test_unknown_names_list_near_ones() -> None:
    refuses(SpecError, "did you mean digits", find, "digit")
    refuses(SpecError, "did you mean resnet20", find("cifar10").recipe, "resnet")
