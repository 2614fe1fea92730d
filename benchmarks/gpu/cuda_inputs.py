"""Pytest plugin: tensors that a test makes without naming a device are made on a GPU.

Those that the package makes are not. So tests that were written for the CPU pass CUDA tensors to the package.
Results go to the file that SWEEP names, a line of JSON each, with the deepest line of the package. DEVICE
names another device.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

DEVICE = os.environ.get("DEVICE", "cuda")
OUT = os.environ.get("SWEEP", "/tmp/sweep")
CONSTRUCTORS = _device_constructors()  # type: ignore[no-untyped-call]
CPU_GENERATOR = torch.Generator


def from_test() -> bool:
    """Return whether the nearest caller outside of torch and this file is a test."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and "/torch/" not in name:
            return "/tests/" in name
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Inputs(TorchFunctionMode):
    """Mode in which tests make tensors on DEVICE."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in CONSTRUCTORS and kwargs.get("device") is None and from_test():
            kwargs["device"] = DEVICE
        return func(*args, **kwargs)


class _IsGenerator(type):
    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, CPU_GENERATOR)


class Generator(metaclass=_IsGenerator):
    """Generator of DEVICE for a test that names none."""

    def __new__(cls, device: Any = None) -> Any:
        if device is None and from_test():
            device = DEVICE
        return CPU_GENERATOR() if device is None else CPU_GENERATOR(device=device)


def pytest_configure() -> None:
    """Enter the mode in this thread and in all that start later."""
    if DEVICE != "cpu":
        torch.Generator = Generator  # type: ignore[assignment,misc]
    Inputs().__enter__()  # type: ignore[no-untyped-call]
    run = threading.Thread.run

    def run_in_mode(self: threading.Thread) -> None:
        with Inputs():  # type: ignore[no-untyped-call]
            run(self)

    threading.Thread.run = run_in_mode  # type: ignore[method-assign]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write a line for each test that ran, or whose setup failed."""
    outcome: Any = yield
    report = outcome.get_result()
    if report.when != "call" and not (report.when == "setup" and report.failed):
        return
    line = {"id": item.nodeid, "outcome": report.outcome, "s": round(report.duration, 2)}
    if call.excinfo is not None and not report.skipped:
        line |= _about(call.excinfo)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    with Path(f"{OUT}.{worker}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def _about(info: pytest.ExceptionInfo[BaseException]) -> dict[str, Any]:
    entries = [(str(entry.path), entry.lineno + 1) for entry in info.traceback]
    ours = [(path, line) for path, line in entries if "/laconic/" in path]
    return {
        "type": info.type.__name__,
        "message": str(info.value)[:600],
        "last": f"{entries[-1][0].split('/site-packages/')[-1]}:{entries[-1][1]}",
        "ours": f"{ours[-1][0].split('/laconic/')[-1]}:{ours[-1][1]}" if ours else None,
        "cause": repr(info.value.__cause__)[:300],
    }
