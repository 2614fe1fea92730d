"""Selection of the implementation of each kernel, by the device of its tensors.

native-avx512 | native-avx2 | native-portable    C++ for CPU tensors: the widest that this CPU runs
triton                                           for CUDA tensors, with Triton 3.6 or newer
reference                                        plain torch for any device
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from laconic._native import Target

TARGETS = ("avx512", "avx2", "portable")
NAMES = ("reference", *reversed(TARGETS))
LEAST_TRITON = (3, 6)  # from here on div_rn keeps denormals

_missing: str | None = None  # why there is no native code
_compiled: tuple[str, ...] = ()
_features: tuple[str, ...] = ()
_runnable: dict[str, type[Target]] = {}
try:
    import laconic._native as _native
except ImportError as error:
    _missing = str(error)
else:
    _compiled, _features = (tuple(text.split(",")) for text in (_native.compiled, _native.features))
    _runnable = {name: getattr(_native, name) for name in TARGETS if name in vars(_native)}
_name = next(iter(_runnable), "reference")
_live: type[Target] | None = _runnable.get(_name)
_reference_only = False


def native(*tensors: Tensor) -> type[Target] | None:
    """Return the native functions for these tensors."""
    if _live is None or not all(tensor.is_cpu for tensor in tensors):
        return None
    return _live


def gpu(*tensors: Tensor) -> bool:
    """Return whether Triton kernels serve these tensors, all on one CUDA device."""
    device = tensors[0].device
    if device.type != "cuda" or _reference_only or triton_missing() is not None:
        return False
    return all(tensor.device == device for tensor in tensors)


@cache
def triton_missing() -> str | None:
    """Return why Triton cannot run, without importing it."""
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "Triton is not installed"
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    least = ".".join(map(str, LEAST_TRITON))
    return None if found >= LEAST_TRITON else f"Triton {version} is older than {least}: install a newer torch"


def device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def runnable() -> tuple[str, ...]:
    return tuple(name for name in NAMES if name == "reference" or name in _runnable)


@contextmanager
def using(name: str) -> Iterator[None]:
    """Use one implementation in the whole process; for tests.

    >>> with using("reference"):
    ...     info()["live"]
    'reference'
    """
    global _name, _live, _reference_only
    if name not in runnable():
        raise ValueError(f"kernels {name!r} cannot run here: choose one of {', '.join(runnable())}")
    before = _name, _live, _reference_only
    _name, _live, _reference_only = name, _runnable.get(name), name == "reference"
    try:
        yield
    finally:
        _name, _live, _reference_only = before


def info() -> dict[str, Any]:
    return {
        "live": _name if _live is None else f"native-{_name}",
        "runnable": runnable(),
        "compiled": _compiled,
        "cpu_features": _features,
        "missing": _missing,
        "triton_missing": triton_missing(),
    }
