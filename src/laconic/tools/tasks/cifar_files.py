"""File formats of CIFAR-10: JPEG archive, binary batches, and pickled batches.

The reader of pickles, which can run any code, allows only four names.
"""

from __future__ import annotations

import io
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from laconic.core.errors import DataError
from laconic.core.extras import require
from laconic.tools.tasks.source import numpy_archive, tensor
from laconic.tools.tasks.task import PARTS, Tensors

BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
MALFORMED = (pickle.UnpicklingError, AttributeError, TypeError, LookupError, ValueError, EOFError)
RECORD = 1 + 3 * 32 * 32


def from_jpegs(path: Path) -> Tensors:
    """Read `{train,test}_jpeg` uint8 (joined files), `_offsets` int64 (n + 1), `_labels` uint8 (n,)."""
    names = [f"{part}_{kind}" for part in ("train", "test") for kind in ("jpeg", "offsets", "labels")]
    train, at_train, labels, test, at_test, test_labels = numpy_archive(path, names)
    images, test_images = decode_jpegs(train, at_train), decode_jpegs(test, at_test)
    return dict(zip(PARTS, (images, tensor(labels), test_images, tensor(test_labels)), strict=True))


def decode_jpegs(joined: NDArray[np.generic], offsets: NDArray[np.generic]) -> Tensor:
    """Decode joined JPEG files to uint8 (n, 3, 32, 32), one thread per core: the decoder releases the GIL."""
    require("PIL", "CIFAR-10 in JPEG files")
    from PIL import Image

    raw, bounds = joined.tobytes(), [int(at) for at in offsets]
    images = np.empty((len(bounds) - 1, 32, 32, 3), dtype=np.uint8)

    def decode(block: range) -> None:
        for i in block:
            with Image.open(io.BytesIO(raw[bounds[i] : bounds[i + 1]])) as image:
                images[i] = np.asarray(image.convert("RGB"))

    blocks = [range(i, min(i + 1000, len(images))) for i in range(0, len(images), 1000)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(decode, blocks):
            continue
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


def from_pickles(folder: Path) -> Tensors:
    train = [_unpickled(folder / name) for name in BATCHES]
    return _joined(train, _unpickled(folder / "test_batch"))


def from_binaries(folder: Path) -> Tensors:
    train = [_records(folder / f"{name}.bin") for name in BATCHES]
    return _joined(train, _records(folder / "test_batch.bin"))


def _joined(train: list[tuple[Tensor, Tensor]], test: tuple[Tensor, Tensor]) -> Tensors:
    images, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
    return dict(zip(PARTS, (images, labels, *test), strict=True))


def _records(path: Path) -> tuple[Tensor, Tensor]:
    raw = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if len(raw) == 0 or len(raw) % RECORD:
        raise DataError(
            f"{path} must contain records of {RECORD} bytes, got {len(raw)} bytes in total; download it again"
        )
    records = tensor(raw).view(-1, RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].clone()


def _unpickled(path: Path) -> tuple[Tensor, Tensor]:
    with path.open("rb") as file:
        try:
            batch: Any = PlainUnpickler(file, encoding="bytes").load()
            images, labels = np.asarray(batch[b"data"], np.uint8), np.asarray(batch[b"labels"], np.uint8)
        except MALFORMED as error:
            raise DataError(f"{path} is not a CIFAR-10 batch: {error!r}; download it again") from error
    return tensor(images).view(-1, 3, 32, 32), tensor(labels)


class PlainUnpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, *, encoding: str) -> None:
        super().__init__(file, encoding=encoding)

    def find_class(self, module: str, name: str) -> Any:
        if (module.replace("numpy._core", "numpy.core"), name) in ALLOWED:
            return ALLOWED[module.replace("numpy._core", "numpy.core"), name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a data file does not need")


def _latin_bytes(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it encodes text as {encoding!r}, not latin1")
    return text.encode("latin1")


def _allowed() -> dict[tuple[str, str], Any]:
    reconstruct = np.zeros(1, np.uint8).__reduce__()[0]  # in numpy 1 and 2 its module differs
    return {
        ("numpy.core.multiarray", "_reconstruct"): reconstruct,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _latin_bytes,
    }


ALLOWED = _allowed()
