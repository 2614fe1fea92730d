"""The stand-in device, for the whole process: these tests run in one of their own."""

from __future__ import annotations

from tests.device import device, triton

collect_ignore_glob = ["test_*.py"] if device.missing() else []
if not device.missing():
    device.install()
    if triton.interpreted():
        triton.install()


def pytest_report_header() -> str:
    return f"stand-in device: {device.missing() or 'gpu:0'}"
