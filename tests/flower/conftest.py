"""These tests need Flower, and run in an environment of their own: `make test-federated`.

Warnings are errors here as everywhere. Those of Flower's own imports are not ours to mend.
"""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flower.example_run import example_run

IDENTITY = {"_run_id": 7, "_node_id": 1, "_task_id": 1}
NOT_OURS = ("ignore:'click\\.:DeprecationWarning",)  # typer, of Flower's command line, with click 8.5


def pytest_configure(config: pytest.Config) -> None:
    for line in NOT_OURS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name their run and node, which the process of a ServerApp sets."""
    from flwr.supercore.task_identity import TaskIdentity

    for name, value in IDENTITY.items():
        monkeypatch.setattr(TaskIdentity, name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The deployed example waits for most of its time, so the others run meanwhile."""
    items.sort(key=lambda item: "deployed_example" in item.fixturenames)  # type: ignore[attr-defined]


def pytest_collection_finish() -> None:
    """Flower collects garbage at each aggregation, 0.2 s each if it has to visit all imported modules."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def early(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[subprocess.Popen[bytes], Path] | None]:
    """Start the deployed example before the first test, if a test needs it."""
    if not any("deployed_example" in item.fixturenames for item in request.session.items):  # type: ignore[attr-defined]
        yield None
        return
    folder = tmp_path_factory.mktemp("deployed")
    with example_run(folder) as script:
        yield script, folder


@pytest.fixture
def deployed_example(early: tuple[subprocess.Popen[bytes], Path]) -> tuple[subprocess.Popen[bytes], Path]:
    """The process of the example, started before the first test, and its folder."""
    return early
