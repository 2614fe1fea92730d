"""Options of the test runs, their scheduling policy, and Ctrl-C in the background.

`--repeats N`: tries of each slow law. `--part 3/64`: every 64th of the selected tests, from the third on.
`--case AXIS=VALUE`: only these cases of a law that loops (`tests/cases.py`). `--full`: full products.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
from collections.abc import Generator
from typing import Any

import pytest

from tests import cases


def pytest_configure(config: pytest.Config) -> None:
    """Tests send SIGINT to what they start, and a shell has it ignored in what runs in the background.

    Under SCHED_BATCH a thread that wakes up preempts none, here and in all processes that tests start. By
    default gloo's thread preempts the one that holds the lock of a connection, and spins until it is free.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # some sandboxes refuse it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cases.full = config.getoption("--full")
    for text in config.getoption("--case"):
        axis, equals, label = text.partition("=")
        if not equals:
            raise pytest.UsageError(f"--case must be AXIS=VALUE, got {text}")
        cases.chosen[axis] = label


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repeats", type=int, help="tries of each slow law (else as many as it says)")
    parser.addoption("--part", help="which part of the chosen tests: 3/64 is the third of 64")
    parser.addoption("--case", action="append", default=[], help="AXIS=VALUE: only these cases of a law")
    parser.addoption("--full", action="store_true", help="full products of cases in place of pairs")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Leave all that is imported and collected, half a million objects, out of later garbage collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def repeats(request: pytest.FixtureRequest) -> int | None:
    count: int | None = request.config.getoption("--repeats")
    if count is not None and count < 1:
        raise pytest.UsageError(f"--repeats must be at least 1, got {count}")
    return count


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)  # the last worker ends earlier
    part = config.getoption("--part")
    if part is None:
        return
    first, step = part_of(part)
    others = [item for i, item in enumerate(items) if i % step != first]
    items[:] = items[first::step]
    config.hook.pytest_deselected(items=others)


def part_of(text: str) -> tuple[int, int]:
    """The first of the chosen items, from 0 on, and the step to the next.

    >>> part_of("3/64")
    (2, 64)
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--part must be one of 1/N to N/N, got {text}")
    return int(found[1]) - 1, int(found[2])
