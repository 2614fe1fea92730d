"""All kinds of kernels at once: a call must return the same bits on each, or be refused by each."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from laconic import kernels
from laconic.core.errors import WireError
from laconic.core.layout import Segments
from tests.cases import case, over

from ..laws.table import same

T = TypeVar("T")
ALL = kernels.runnable()  # the reference first
NAN, INF = float("nan"), float("inf")
LARGEST, DENORMAL = torch.finfo(torch.float32).max, 2.0**-149
BUFFERS = {
    "none": Segments((), ()),
    "empty": Segments.whole(0),
    "one": Segments.whole(1),
    "whole": Segments.whole(5_003),
    "neighbours": Segments.consecutive([1, 7, 0, 8, 9, 15, 16, 17, 127, 128, 129, 4095, 4097, 64]),
    "apart": Segments((7, 3, 900, 2000), (0, 1, 700, 257)),
    "backwards": Segments((2000, 0), (600, 1999)),
}


def agree(call: Callable[[], T]) -> T:
    """Return what a call returns, which must be the same bits on every target."""
    results = {}
    for target in ALL:
        with case(target=target), kernels.using(target):
            results[target] = call()
            assert alike(results[target], results[ALL[0]]), "other bits than those of the reference"
    return results[ALL[0]]


def alike(a: Any, b: Any) -> bool:
    """Return whether two results are equal, tensors bit for bit."""
    if isinstance(a, Tensor):
        return same(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(alike(*pair) for pair in zip(a, b, strict=True))
    return bool(a == b)


def refused(match: str | None, *calls: Callable[[], Any], error: type[Exception] = WireError) -> None:
    """Assert that every target refuses each call, with a message that matches `match`, if any."""
    for target in ALL:
        with case(target=target), kernels.using(target):
            for i, call in enumerate(calls):
                with case(call=i), pytest.raises(error, match=match):
                    call()


def outside(segments: Segments, n: int) -> Tensor:
    """Return a mask bool (n,) of the entries outside the segments."""
    mask = torch.ones(n, dtype=torch.bool)
    for view in segments.views(mask):
        view.fill_(False)
    return mask


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def heavy(n: int, seed: int = 0) -> Tensor:
    """Heavy-tailed, with zeros of both signs, a constant and denormals."""
    x = normal(n, seed) ** 3
    x[5:40], x[40:60], x[300:450] = 0, -0.0, 0.1
    x[600:800] *= 1e-41
    return x


def spoilt(n: int, at: int, value: float) -> Tensor:
    """Ones with one other entry."""
    x = torch.ones(n)
    x[at] = value
    return x


def keys_of(segments: Segments) -> list[int]:
    return [2**64 - 1 - i for i in range(len(segments))]


def integers(values: Iterable[int]) -> Tensor:
    return torch.tensor([*values], dtype=torch.int32)


def wire_of(*values: int) -> Tensor:
    """Return these bytes as a wire."""
    return torch.tensor(values, dtype=torch.uint8)


def bytes_of(values: float | list[float]) -> Tensor:
    """Return the bytes of float32 numbers."""
    return torch.tensor(values).view(-1).view(torch.uint8)


def bits_of(text: str) -> Tensor:
    """Return a wire from bits, the lowest of the first byte first; spaces are ignored."""
    text = re.sub(r"\s", "", text)
    text += "0" * (-len(text) % 8)
    return wire_of(*(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8)))


def spelt(value: int, width: int) -> str:
    """Return a number in bits, the lowest first."""
    return format(value, f"0{width}b")[::-1] if width else ""


def on_every_target(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test once per target, whose name it gets: for results that agree only up to rounding."""

    def run(target: str, **rest: Any) -> None:
        with kernels.using(target):
            test(target=target, **rest)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return over(target=ALL)(run)
