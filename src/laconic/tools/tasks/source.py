"""A task's files, in the given folder or $LACONIC_DATA."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.core.errors import DataError

VARIABLE = "LACONIC_DATA"
Reader = Callable[[Path], dict[str, Tensor]]


def read_first(task: str, given: Path | None, readers: Mapping[str, Reader], how: str) -> dict[str, Tensor]:
    folder = data_folder(given)
    wanted = " or ".join(readers)
    if folder is None:
        raise DataError(
            f"{task} needs {wanted}: set its folder with --data FOLDER or {VARIABLE}=FOLDER; {how}"
        )
    for name, read in readers.items():
        path = folder / name
        if path.exists():
            return _checked(read, path)
    raise DataError(f"{task}: no {wanted} in {folder} (--data FOLDER or {VARIABLE} names the folder); {how}")


def data_folder(given: Path | None) -> Path | None:
    named = given or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if named is not None and not named.is_dir():
        raise DataError(f"no data folder {named}: --data FOLDER or {VARIABLE} must name an existing folder")
    return named


def numpy_archive(path: Path, names: Sequence[str]) -> list[NDArray[np.generic]]:
    with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        missing = [name for name in names if name not in archive.files]
        if missing:
            raise DataError(f"{path} has no array {missing[0]!r}; it has {', '.join(archive.files)}")
        return [archive[name] for name in names]


def tensor(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).copy())


def _checked(read: Reader, path: Path) -> dict[str, Tensor]:
    try:
        tensors = read(path)
    except DataError:
        raise
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise DataError(f"cannot read {path}: {error}; download it again") from error
    for part in ("train", "test"):
        images, labels = len(tensors[f"{part}_x"]), len(tensors[f"{part}_y"])
        if images != labels or images == 0:
            raise DataError(f"{path}: {images} {part} examples with {labels} labels; download it again")
    return tensors
