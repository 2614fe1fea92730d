"""Deferred checks: at once on the CPU, one read at the end of a block elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.unit.shared import for_each, refuses

from laconic.core import deferred as module
from laconic.core.deferred import check, deferred, translated


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Remote(torch.Tensor):
    """Flags that pretend not to be on the CPU."""

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False


def remote(*values: int) -> torch.Tensor:
    return flags(*values).as_subclass(Remote)


def error(i: int) -> Exception:
    return ValueError(f"tensor {i}")


def test_on_the_cpu_a_set_flag_raises_at_once() -> None:
    with pytest.raises(ValueError, match="tensor 2"), deferred():
        check(flags(0, 0, 1), error)
        raise AssertionError("the check did not raise")


def test_elsewhere_flags_are_read_when_the_block_ends() -> None:
    passed = []
    with pytest.raises(ValueError, match="tensor 1"), deferred():
        check(remote(0), error)
        check(remote(0, 1), error)
        passed.append(True)
    assert passed
    assert module._pending.flags is None


def test_without_a_block_flags_are_read_at_once() -> None:
    check(remote(0, 0), error)
    refuses(ValueError, "tensor 0", lambda: check(remote(3), error))


def test_an_error_of_the_block_drops_its_flags() -> None:
    with pytest.raises(KeyError), deferred():
        check(remote(1), error)
        raise KeyError
    check(remote(0), error)


@for_each("make", [flags, remote])
def test_translations_apply_once_to_errors_now_and_later(make: Callable[..., torch.Tensor]) -> None:
    def prefix(text: str) -> Callable[[Exception], Exception]:
        return lambda error: RuntimeError(f"{text}: {error}")

    with (
        pytest.raises(RuntimeError, match=r"^bucket: outer: rank 3: tensor 0$"),
        translated(prefix("bucket")),
        deferred(),
        translated(prefix("outer")),
        translated(prefix("rank 3")),
    ):
        check(make(1), error)
