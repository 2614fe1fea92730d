"""`--repeats N`: how often the laws of `make soak` are tried, so that a night of them goes in parts."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repeats", type=int, help="tries of each slow law (else as many as it says)")


@pytest.fixture(scope="session")
def repeats(request: pytest.FixtureRequest) -> int | None:
    count: int | None = request.config.getoption("--repeats")
    if count is not None and count < 1:
        raise pytest.UsageError(f"--repeats must be at least 1, got {count}")
    return count
