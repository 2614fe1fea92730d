"""These tests need Flower, and run in an environment of their own: `make test-federated`.

Warnings are errors here as everywhere. Those of Flower's own imports are not ours to mend.
"""

from __future__ import annotations

import pytest

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
