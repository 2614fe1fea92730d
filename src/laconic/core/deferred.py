"""Deferred checks of GPU flags, and deferred writes of means whose step may be skipped.

Reading a flag makes the host wait; in a `deferred` block, all flags are read in one copy at its end. A `late`
block collects writes of means until the ranks agree on a skip.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from laconic.core.errors import WireError

MakeError = Callable[[int], Exception]
Write = Callable[[], object]


class _Pending(threading.local):
    flags: list[tuple[Tensor, MakeError]] | None = None
    translate: Callable[[Exception], Exception] | None = None
    writes: list[Write] | None = None


_pending = _Pending()


def check(flags: Tensor, error: MakeError) -> None:
    """Raise `error(i)` for the first entry i of `flags` int32 (k,) that is not zero.

    Before the end of a `deferred` block nothing on the host may depend on GPU flags, and a kernel must itself
    read the flag before it writes.

    >>> check(torch.tensor([0, 1], dtype=torch.int32), lambda i: ValueError(f"tensor {i} is not finite"))
    Traceback (most recent call last):
    ValueError: tensor 1 is not finite
    """
    if _pending.flags is None or flags.is_cpu:
        _raise_first(flags.tolist(), [(flags.numel(), error)])
    else:
        translate = _pending.translate
        make = error if translate is None else lambda i: translate(error(i))
        _pending.flags.append((flags, make))


@contextmanager
def deferred() -> Iterator[None]:
    """Collect the GPU flags of `check` in this thread. An error drops them. Blocks nest."""
    outer = _pending.flags, _pending.translate
    _pending.flags, _pending.translate = [], None
    try:
        yield
        collected = _pending.flags
    finally:
        _pending.flags, _pending.translate = outer
    if collected:
        read = torch.cat([flags for flags, _ in collected]).tolist()
        _raise_first(read, [(flags.numel(), make) for flags, make in collected])


@contextmanager
def translated(translate: Callable[[Exception], Exception]) -> Iterator[None]:
    """Pass errors of this block and its deferred checks through `translate`."""
    outer = _pending.translate
    _pending.translate = translate if outer is None else lambda error: outer(translate(error))
    try:
        yield
    except Exception as error:
        other = translate(error)
        if other is error:
            raise
        raise other from error
    finally:
        _pending.translate = outer


def numbering(number: int) -> AbstractContextManager[None]:
    """Return a context that sets the `message` of a `WireError` to this number."""

    def translate(error: Exception) -> Exception:
        if isinstance(error, WireError) and error.message is None:
            error.message = number
        return error

    return translated(translate)


def write(write: Write) -> None:
    """Write a mean now, or after the current `late` block.

    >>> write(lambda: print("written"))
    written
    >>> with late() as writes:
    ...     write(lambda: print("written"))
    >>> len(writes)
    1
    """
    if _pending.writes is None:
        write()
    else:
        _pending.writes.append(write)


def is_late() -> bool:
    return _pending.writes is not None


@contextmanager
def late(wait: bool = True) -> Iterator[list[Write]]:
    """Collect the writes of this block in this thread, unless `wait` is False."""
    outer, writes = _pending.writes, list[Write]()
    _pending.writes = writes if wait else None
    try:
        yield writes
    finally:
        _pending.writes = outer


def _raise_first(flags: list[int], parts: list[tuple[int, MakeError]]) -> None:
    at = 0
    for size, make in parts:
        for i, flag in enumerate(flags[at : at + size]):
            if flag:
                raise make(i)
        at += size
