"""Memory in a file, read and written by a thread."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from laconic.core.errors import StateError
from laconic.data.memory import Memory

NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class OnDisk(Memory):
    """File of `samples * nbytes` bytes, allocated at once and deleted when closed.

    The file is `path`, or `path.1`, `path.2`, ... if another process holds its lock; the file of a killed run
    is reused. Rows of the current and the next mini-batch are in RAM. One thread reads ahead and writes, in
    the order of the calls. A full disk raises `OSError`; with mapped memory it would kill the process.

    Raises:
        OSError, StateError: The disk is too small.
    """

    def __init__(self, samples: int, nbytes: int, path: Path) -> None:
        super().__init__(samples, nbytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self.path = _own(path)
        try:
            _reserve(self._file, self.path, samples, nbytes)
        except (OSError, StateError):
            self.path.unlink()
            os.close(self._file)
            raise
        self._rows: dict[int, Tensor] = {}  # by sample, in RAM
        self._pending_writes: dict[int, int] = {}
        self._wanted: frozenset[int] = frozenset()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="laconic-rows")
        self._last: Future[None] | None = None
        self._failure: OSError | None = None

    def read(self, sample: int) -> Tensor:
        with self._lock:
            row = self._rows.get(sample)
        return self._load(sample) if row is None else row

    def write(self, sample: int, row: Tensor) -> None:
        self.check()
        own = row.to("cpu", copy=True)
        with self._lock:
            self._rows[sample] = own
            self._pending_writes[sample] = self._pending_writes.get(sample, 0) + 1
        self._last = self._thread.submit(self._store, sample, own)

    def prefetch(self, samples: list[int]) -> None:
        with self._lock:
            self._wanted = frozenset(samples)
            needed = self._pending_writes.keys() | self._wanted
            for sample in self._rows.keys() - needed:
                del self._rows[sample]
        self._last = self._thread.submit(self._fetch, samples)

    def flush(self) -> None:
        if self._last is not None:
            self._last.result()  # the thread works in order
        self.check()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self.path.unlink(missing_ok=True)  # before the lock is released
        os.close(self._file)

    def _fetch(self, samples: list[int]) -> None:
        for sample in samples:
            with self._lock:
                known = sample in self._rows
            if not known:
                row = self._load(sample)
                with self._lock:
                    self._rows.setdefault(sample, row)  # unless written in the meantime

    def _load(self, sample: int) -> Tensor:
        data = os.pread(self._file, self.nbytes, sample * self.nbytes)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def _store(self, sample: int, row: Tensor) -> None:
        try:
            if self._failure is None:
                _write_all(self._file, row, sample * self.nbytes)
        except OSError as error:
            self._failure = _explained(error, self.path, self.samples * self.nbytes)
        with self._lock:
            self._pending_writes[sample] -= 1
            if not self._pending_writes[sample]:
                del self._pending_writes[sample]
                if sample not in self._wanted and self._failure is None:
                    self._rows.pop(sample, None)


def _own(path: Path) -> tuple[int, Path]:
    place, turn = path, 0
    while True:
        file = os.open(place, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)
        except BlockingIOError:
            os.close(file)
            turn += 1
            place = path.with_name(f"{path.name}.{turn}")
        except OSError:
            os.close(file)
            raise
        else:
            return file, place


def _reserve(file: int, path: Path, samples: int, nbytes: int) -> None:
    free, needed = shutil.disk_usage(path.parent).free, samples * nbytes
    if needed > free:
        raise StateError(
            f"{path} needs {needed:,} bytes ({samples:,} samples of {nbytes:,}), the disk has {free:,}"
            ' free: use another folder, or keep="minmax(bits=8)"'
        )
    try:
        os.posix_fallocate(file, 0, max(1, needed))
    except OSError as error:
        raise _explained(error, path, needed) from error


def _write_all(file: int, row: Tensor, offset: int) -> None:
    data = memoryview(row.numpy())  # type: ignore[arg-type]  # numpy's stubs lack the buffer protocol
    while data:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done


def _explained(error: OSError, path: Path, needed: int) -> OSError:
    reason = "the disk is full" if error.errno == errno.ENOSPC else os.strerror(error.errno or 0)
    text = f"{reason}: cannot write buffers of {needed:,} bytes"
    if error.errno in NO_ROOM:
        text = f"{reason}: buffers of {needed:,} bytes do not fit"
    return OSError(error.errno, text, str(path))
