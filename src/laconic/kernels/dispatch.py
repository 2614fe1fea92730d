"""Which implementation of the kernels is live: native code for this CPU, or the reference in plain torch.

native-avx512 | native-avx2 | native-portable    C++, for CPU tensors, the widest that this CPU runs
reference                                        torch, for any device and where nothing was compiled
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from laconic._native import Target

TARGETS = ("avx512", "avx2", "portable")  # widest first
NAMES = ("reference", *reversed(TARGETS))

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


def native(*tensors: Tensor) -> type[Target] | None:
    """The native functions that serve these tensors, or None where the reference does."""
    if _live is None or not all(tensor.is_cpu for tensor in tensors):
        return None
    return _live


def runnable() -> tuple[str, ...]:
    """The implementations that this machine can run, for `using`."""
    return tuple(name for name in NAMES if name == "reference" or name in _runnable)


@contextmanager
def using(name: str) -> Iterator[None]:
    """Make one implementation live, in the whole process, for the length of a `with` block: a tool for tests.

    >>> with using("reference"):
    ...     info()["live"]
    'reference'
    """
    global _name, _live
    if name not in runnable():
        raise ValueError(f"kernels {name!r} cannot run here: choose one of {', '.join(runnable())}")
    before = _name, _live
    _name, _live = name, _runnable.get(name)
    try:
        yield
    finally:
        _name, _live = before


def info() -> dict[str, Any]:
    """What is live, what was compiled, what this CPU can do, and why native code is missing where it is."""
    return {
        "live": _name if _live is None else f"native-{_name}",
        "runnable": runnable(),
        "compiled": _compiled,
        "cpu_features": _features,
        "missing": _missing,
    }
