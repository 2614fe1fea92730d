"""The pool of worker processes, one for the whole run, and a short training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from laconic.tools.tasks.settings import TrainingSettings

from .plans import noise_plan
from .pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """`pool.run(size, function, *args)` calls a function of the test's module on `size` ranks."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def plan(tmp_path: Path) -> TrainingSettings:
    return noise_plan(tmp_path)
