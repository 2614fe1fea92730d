"""The pool of worker processes, one for the whole run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """`pool.run(size, function, *args)` calls a function of the test's module on `size` ranks."""
    pool = Pool()
    yield pool
    pool.close()
